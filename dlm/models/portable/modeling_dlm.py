"""The network of a `dlm` checkpoint, for transformers with `trust_remote_code=True`. Needs only torch and transformers.
It is one file because transformers copies and runs a checkpoint's modelling code file by file.

    model = AutoModel.from_pretrained(folder, trust_remote_code=True)
    logits = model(input_ids).logits

The model predicts the tokens that are masked (`config.mask_token_id`); how a text is decoded from these predictions is the
caller's choice. See `DLMConfig` for who sees whom, and for which position's logits predict which token.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import MaskedLMOutput

from .configuration_dlm import DLMConfig


class DLMRMSNorm(nn.Module):
    """Root-mean-square norm, computed in fp32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)).to(x.dtype)


def rotary_frequencies(config: DLMConfig) -> tuple[Tensor, float]:
    """Inverse frequencies (rotary_dim / 2,) in fp32, and the factor on cosine and sine (1 unless yarn)."""
    rope = config.rope_parameters
    dim = config.rotary_dim or config.head_dim
    # On the CPU, so that they are numbers even while transformers builds the model on the meta device.
    freq = 1.0 / rope["rope_theta"] ** (torch.arange(0, dim, 2, dtype=torch.float32, device="cpu") / dim)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return freq, 1.0
    if kind == "linear":
        return freq / rope["factor"], 1.0
    if kind == "llama3":
        turns = rope["original_max_position_embeddings"] * freq / (2 * math.pi)
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        blend = ((turns - low) / (high - low)).clamp(0, 1)
        return (1 - blend) * freq / rope["factor"] + blend * freq, 1.0
    if kind == "yarn":
        return _yarn(freq, dim, config)
    raise ValueError(f"rope type {kind!r} is not supported; known: default, linear, llama3, yarn")


def _yarn(freq: Tensor, dim: int, config: DLMConfig) -> tuple[Tensor, float]:
    """YaRN (arXiv 2309.00071, eq. 17-23)."""
    rope = config.rope_parameters
    factor = rope["factor"]
    old = rope.get("original_max_position_embeddings") or config.max_position_embeddings

    def channel(turns: float) -> float:
        return dim * math.log(old / (turns * 2 * math.pi)) / (2 * math.log(rope["rope_theta"]))

    def growth(scale: float) -> float:
        return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0

    low, high = channel(rope.get("beta_fast") or 32), channel(rope.get("beta_slow") or 1)
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = ((torch.arange(dim // 2, dtype=torch.float32, device="cpu") - low) / max(high - low, 1e-3)).clamp(0, 1)
    gain = rope.get("attention_factor")
    if gain is None:
        some, whole = rope.get("mscale"), rope.get("mscale_all_dim")
        gain = growth(some) / growth(whole) if some and whole else growth(1.0)
    return freq / factor * ramp + freq * (1 - ramp), gain


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding (half-split layout) of the first channels of each head; x is (b, l, h, e), cos is (b, l, 1, r)."""
    r = cos.shape[-1]
    turned, rest = x[..., :r], x[..., r:]
    half = torch.cat((-turned[..., r // 2 :], turned[..., : r // 2]), dim=-1)
    return torch.cat(((turned * cos + half * sin).to(x.dtype), rest), dim=-1)


class DLMAttention(nn.Module):
    """Grouped-query attention with optional biases and norms on query and key heads."""

    def __init__(self, config: DLMConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        query, key = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, query, bias=config.qkv_bias)
        self.k_proj = nn.Linear(config.hidden_size, key, bias=config.qkv_bias)
        self.v_proj = nn.Linear(config.hidden_size, key, bias=config.qkv_bias)
        self.o_proj = nn.Linear(query, config.hidden_size, bias=config.o_bias)
        self.q_norm = DLMRMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = DLMRMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else None

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor] | None, allowed: Tensor | None) -> Tensor:
        shape = (*x.shape[:-1], -1, self.head_dim)
        q, k, v = self.q_proj(x).view(shape), self.k_proj(x).view(shape), self.v_proj(x).view(shape)  # (b, l, h, e)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if rope is not None:
            q, k = rotate(q, *rope), rotate(k, *rope)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # (b, h, l, e)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed, enable_gqa=q.shape[1] != k.shape[1])
        return self.o_proj(out.transpose(1, 2).flatten(-2))


class DLMMLP(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    def __init__(self, width: int, inner: int, bias: bool) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, inner, bias=bias)
        self.up_proj = nn.Linear(width, inner, bias=bias)
        self.down_proj = nn.Linear(inner, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DLMRouter(nn.Module):
    """The experts of every token and their weights, scored in fp32 (DeepSeek-V3, arXiv 2412.19437, section 2.1.2)."""

    bias: Tensor | None

    def __init__(self, config: DLMConfig) -> None:
        super().__init__()
        assert config.moe is not None
        self.moe = config.moe
        self.weight = nn.Parameter(torch.empty(self.moe["num_experts"], config.hidden_size))
        bias = torch.zeros(self.moe["num_experts"]) if self.moe["expert_bias"] else None
        self.register_buffer("bias", bias)  # moved by balancing, not by gradients

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x is (n, d); experts and weights are (n, k)."""
        moe = self.moe
        logits = F.linear(x.float(), self.weight.float())
        scores = logits.sigmoid() if moe["score_function"] == "sigmoid" else logits.softmax(-1)
        choice = scores if self.bias is None else scores + self.bias.float()
        if moe["topk_group"] < moe["n_group"]:
            groups = choice.view(len(x), moe["n_group"], -1)
            best = groups.topk(2, dim=-1).values.sum(-1).topk(moe["topk_group"], dim=-1).indices
            kept = torch.zeros(groups.shape[:2], dtype=torch.bool, device=x.device).scatter_(1, best, True)
            choice = groups.masked_fill(~kept[:, :, None], float("-inf")).flatten(1)
        experts = choice.topk(moe["num_experts_per_tok"], dim=-1).indices
        weights = scores.gather(-1, experts)
        if moe["norm_topk_prob"] and moe["num_experts_per_tok"] > 1:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return experts, weights * moe["routed_scaling_factor"]


class DLMExperts(nn.Module):
    """The weights of all experts, stacked."""

    def __init__(self, config: DLMConfig) -> None:
        super().__init__()
        assert config.moe is not None
        e, f, d = config.moe["num_experts"], config.moe["intermediate_size"], config.hidden_size
        self.gate_up = nn.Parameter(torch.empty(e, 2 * f, d))
        self.down = nn.Parameter(torch.empty(e, d, f))

    def forward(self, x: Tensor, expert: int) -> Tensor:
        gate, up = F.linear(x, self.gate_up[expert]).chunk(2, dim=-1)
        return F.linear(F.silu(gate) * up, self.down[expert])


class DLMMoE(nn.Module):
    """The routed experts, weighted and summed in fp32, plus the shared ones."""

    def __init__(self, config: DLMConfig) -> None:
        super().__init__()
        assert config.moe is not None
        shared = config.moe["num_shared_experts"] * config.moe["intermediate_size"]
        self.router = DLMRouter(config)
        self.experts = DLMExperts(config)
        self.shared = DLMMLP(config.hidden_size, shared, bias=False) if shared else None

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        chosen, weights = self.router(flat)
        parts = flat.new_zeros(*chosen.shape, flat.shape[-1])  # (n, k, d)
        for expert in chosen.unique().tolist():
            token, place = (chosen == expert).nonzero(as_tuple=True)
            parts[token, place] = self.experts(flat[token], expert)
        out = (parts.float() * weights[..., None]).sum(1).to(x.dtype)
        if self.shared is not None:
            out = out + self.shared(flat)
        return out.view_as(x)


class DLMLayer(nn.Module):
    """x + attention(norm(x)), then x + feed-forward(norm(x))."""

    def __init__(self, config: DLMConfig, number: int) -> None:
        super().__init__()
        sparse = config.moe is not None and number >= config.moe["first_k_dense"]
        self.input_layernorm = DLMRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = DLMAttention(config)
        self.post_attention_layernorm = DLMRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = DLMMoE(config) if sparse else DLMMLP(config.hidden_size, config.intermediate_size, config.mlp_bias)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor] | None, allowed: Tensor | None) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), rope, allowed)
        return x + self.mlp(self.post_attention_layernorm(x))


class DLMBackbone(nn.Module):
    """Embeddings, layers and the last norm: token ids to hidden states."""

    def __init__(self, config: DLMConfig) -> None:
        super().__init__()
        self.config = config
        learned = config.position_embedding == "learned"
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.embed_positions = nn.Embedding(config.max_position_embeddings, config.hidden_size) if learned else None
        self.layers = nn.ModuleList(DLMLayer(config, i) for i in range(config.num_hidden_layers))
        self.norm = DLMRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rope = None if learned else rotary_frequencies(config)  # no buffer: recomputed, never stored, always fp32
        self.gradient_checkpointing = False
        self._gradient_checkpointing_func: Any = None  # set by transformers

    def forward(
        self, embeds: Tensor, positions: Tensor, valid: Tensor | None, keep: bool
    ) -> tuple[Tensor, tuple[Tensor, ...] | None]:
        """The last states (b, l, d), normed; with `keep`, also those before the first layer and after each layer."""
        x = embeds if self.embed_positions is None else embeds + self.embed_positions(positions)
        allowed = self.allowed(positions, valid)
        rope = None if self.rope is None else self.cos_sin(positions, x.dtype)
        states = [x]  # grows only if `keep`
        for layer in self.layers:
            if self.gradient_checkpointing and self.training:
                x = self._gradient_checkpointing_func(layer.__call__, x, rope, allowed)
            else:
                x = layer(x, rope, allowed)
            if keep:
                states.append(x)
        x = self.norm(x)
        return x, (*states[:-1], x) if keep else None

    def cos_sin(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosine and sine of every position, (b, l, 1, rotary_dim) each."""
        assert self.rope is not None
        freq, gain = self.rope
        angle = positions[:, :, None, None].float() * freq.to(positions.device)
        angle = torch.cat((angle, angle), dim=-1)
        return (angle.cos() * gain).to(dtype), (angle.sin() * gain).to(dtype)

    def allowed(self, positions: Tensor, valid: Tensor | None) -> Tensor | None:
        """Which keys each query sees, (b, 1, l, l); None when all of them."""
        seen = None
        if self.config.attention != "bidirectional":
            blocks = self.config.attention == "block_causal"
            place = positions // (self.config.block_length or 1) if blocks else positions
            seen = place[:, None, :] <= place[:, :, None]
        if valid is not None:
            seen = valid[:, None, :] if seen is None else seen & valid[:, None, :]
            # Padding sees itself, so that no row of the softmax is empty. Nobody else sees it.
            seen = seen | torch.eye(valid.shape[1], dtype=torch.bool, device=valid.device)
        return None if seen is None else seen[:, None]


class DLMForMaskedLM(PreTrainedModel):
    """Token ids to logits."""

    config_class = DLMConfig
    base_model_prefix = "model"
    main_input_name = "input_ids"
    supports_gradient_checkpointing = True
    _no_split_modules = ["DLMLayer"]  # noqa: RUF012 (transformers reads a plain list)
    _supports_sdpa = True

    def __init__(self, config: DLMConfig) -> None:
        super().__init__(config)
        self.model = DLMBackbone(config)
        tied = config.tie_word_embeddings
        self.lm_head = None if tied else nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()
        # Rounded, it would choose other experts. Set here because transformers 4 refuses a name that no module has.
        self._keep_in_fp32_modules_strict = {"router.bias"}

    def _init_weights(self, module: nn.Module) -> None:
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=self.config.initializer_range)
            else:
                nn.init.zeros_(parameter) if name == "bias" else nn.init.ones_(parameter)

    def get_input_embeddings(self) -> nn.Module:
        return self.model.embed_tokens

    def set_input_embeddings(self, value: nn.Module) -> None:
        assert isinstance(value, nn.Embedding)
        self.model.embed_tokens = value

    def get_output_embeddings(self) -> nn.Module | None:
        return self.lm_head

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        assert isinstance(new_embeddings, nn.Linear)
        self.lm_head = new_embeddings

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        **_: Any,
    ) -> MaskedLMOutput | tuple[Any, ...]:
        """Logits (b, l, vocab_size) of ids (b, l).

        `attention_mask` (b, l) is 0 on padding. `position_ids` (b, l) count from 0 by default. With `labels` (b, l), `loss`
        is the mean cross-entropy of the tokens whose label is not -100. `hidden_states` are the states before the first
        layer and after each layer, the last of them normed.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give either input_ids or inputs_embeds")
        embeds = self.model.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        if attention_mask is not None and (shape := attention_mask.shape) != embeds.shape[:2]:
            raise ValueError(f"attention_mask of shape {tuple(shape)} should be {tuple(embeds.shape[:2])}")
        if position_ids is None:
            position_ids = torch.arange(embeds.shape[1], device=embeds.device)[None]
        positions = position_ids.expand(embeds.shape[:2])
        valid = None if attention_mask is None else attention_mask.bool()
        keep = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        last, states = self.model(embeds, positions, valid, bool(keep))
        if self.lm_head is None:
            logits = F.linear(last, self.model.embed_tokens.weight.to(last.device))
        else:
            logits = self.lm_head(last)
        loss = None
        if labels is not None:
            shift = self.config.shifted_logits
            found, truth = (logits[:, :-1], labels[:, 1:]) if shift else (logits, labels)
            loss = F.cross_entropy(found.flatten(0, 1).float(), truth.flatten(), ignore_index=-100)
        output = MaskedLMOutput(loss=loss, logits=logits, hidden_states=states)  # pyright: ignore[reportArgumentType]
        return output.to_tuple() if return_dict is False else output
