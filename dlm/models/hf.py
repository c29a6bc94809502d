"""The network as transformers' `PreTrainedModel`, for peft, bitsandbytes and device_map. Nothing else imports this.

Importing it registers every family that transformers lacks with its Auto classes.
"""

import re
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForMaskedLM, PretrainedConfig
from transformers import PreTrainedModel as _PreTrainedModel
from transformers.conversion_mapping import register_checkpoint_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming
from transformers.modeling_outputs import MaskedLMOutput

from dlm.errors import UserError
from dlm.models.config import ModelConfig
from dlm.models.families import FAMILIES, config_from_hub
from dlm.models.hub_tensors import hub_layout
from dlm.models.lm import LM
from dlm.models.packing import align
from dlm.models.portable import hub_code
from dlm.models.saving import NATIVE, hub_settings, portable
from dlm.models.transformer import Transformer

FUSED = ("llada_moe", "llada2_moe")
"""Families whose checkpoints need more than new names: `dlm.load` reads them, `wrap` brings them here as `dlm`."""


class HubConfig(PretrainedConfig):
    """A family's config.json, kept as it is spelt."""

    def __post_init__(self, **hub: Any) -> None:
        hub.pop("model_type", None)
        if found := hub_code(hub.pop("auto_map", None)):  # code in the folder would not be saved with this class
            hub["auto_map"] = found
        scaling = hub.pop("rope_scaling", None)
        if scaling:  # the spelling that transformers 5 keeps
            hub["rope_parameters"] = {**scaling, "rope_theta": hub.pop("rope_theta", 10_000.0)}
        super().__post_init__(**hub)

    def shape(self) -> ModelConfig:
        """The network that it describes."""
        hub = self.to_dict() | {"model_type": self.model_type}
        hub.pop("quantization_config", None)  # quantised on the way in, by transformers
        return config_from_hub(hub, "config")


class HubModel(_PreTrainedModel):
    """`Transformer` with transformers' interface: padding masks, labels, gradient checkpointing, device maps."""

    base_model_prefix = "network"
    main_input_name = "input_ids"
    supports_gradient_checkpointing = True
    _no_split_modules = ["Layer"]  # noqa: RUF012 (transformers reads a plain list)
    _supports_sdpa = True

    def __init__(self, config: HubConfig) -> None:
        super().__init__(config)
        self.network = Transformer(config.shape())
        self.post_init()
        if not self.network.embed.weight.is_meta:  # from scratch: transformers initialises one module at a time
            self.network.initialise()

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
        """As in transformers, then aligns the weights in memory, so that logits are the same in every process."""
        found = super().from_pretrained(*args, **kwargs)
        align(found[0] if isinstance(found, tuple) else found)
        return found

    def _init_weights(self, module: nn.Module) -> None:
        """Weights that a checkpoint lacks."""
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=self.network.config.initializer_range)
            else:
                nn.init.zeros_(parameter) if name == "bias" else nn.init.ones_(parameter)

    def get_input_embeddings(self) -> nn.Module:
        return self.network.embed

    def set_input_embeddings(self, value: nn.Module) -> None:
        assert isinstance(value, nn.Embedding)
        self.network.embed = value

    def get_output_embeddings(self) -> nn.Module | None:
        return self.network.lm_head

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        assert isinstance(new_embeddings, nn.Linear)
        self.network.lm_head = new_embeddings

    def forward(
        self,
        input_ids: Int[Tensor, "b l"],
        attention_mask: Int[Tensor, "b l"] | None = None,
        position_ids: Int[Tensor, "b l"] | None = None,
        labels: Int[Tensor, "b l"] | None = None,
        return_dict: bool | None = None,
        **_: Any,
    ) -> MaskedLMOutput | tuple[Tensor, ...]:
        """Raw logits; with `labels`, the mean cross-entropy of the tokens whose label is not -100."""
        valid = None if attention_mask is None else attention_mask.bool()
        logits: Float[Tensor, "b l v"] = self.network(input_ids, position_ids, valid)
        loss = None
        if labels is not None:
            shift = self.network.config.shifted_logits
            aligned, targets = (logits[:, :-1], labels[:, 1:]) if shift else (logits, labels)
            loss = F.cross_entropy(aligned.flatten(0, 1).float(), targets.flatten(), ignore_index=-100)
        output = MaskedLMOutput(loss=loss, logits=logits)
        return output.to_tuple() if return_dict is False else output


def wrap(lm: LM) -> HubModel:
    """The same network, sharing its weights, as a transformers model (for peft and the like)."""
    config = portable(lm.config)
    if config.model_type in (*FUSED, *NATIVE):
        config = config.model_copy(update={"model_type": "dlm"})
    settings = hub_settings(lm, config, lm.dtype)
    with torch.device("meta"):
        model = MODELS[config.model_type](CONFIGS[config.model_type](**settings))
    model.network = lm.network
    return model


def unwrap(model: nn.Module, tokenizer: Any = None, name: str = "unnamed") -> LM:
    """The `LM` inside a transformers model (merge adapters first)."""
    inner = getattr(model, "network", None)
    if not isinstance(inner, Transformer):
        raise UserError(f"{type(model).__name__} holds no dlm network; with peft, call merge_and_unload() first")
    return LM(inner, tokenizer, name)


def renamings(family: str) -> list[WeightConverter | WeightRenaming]:
    """Rules that rename the family's weights to ours, for transformers; they also work backwards."""
    everything: dict[str, Any] = {"hidden_size": 8, "head_dim": 2, "intermediate_size": 8, "vocab_size": 8}
    everything |= {"num_hidden_layers": 2, "qkv_bias": True, "o_bias": True, "mlp_bias": True}
    everything["qk_norm"] = family != "llada"  # whose norms, if any, span all heads
    if family == "dlm":
        experts = {"num_experts": 2, "num_experts_per_tok": 1, "intermediate_size": 8, "num_shared_experts": 1}
        everything["moe"] = {**experts, "first_k_dense": 1, "expert_bias": True}
    rules: dict[str, str] = {}
    for position in ("rope", "learned") if family == "dlm" else ("rope",):
        with torch.device("meta"):
            network = Transformer(ModelConfig.model_validate({**everything, "position_embedding": position}))
        shapes = {name: tuple(tensor.shape) for name, tensor in network.state_dict().items()}
        for hub, tensor in hub_layout(FAMILIES[family].names[0], shapes).items():
            theirs = re.sub(r"\\\.\d+\\\.", lambda _: r"\.(\d+)\.", re.escape(hub))
            ours = re.sub(r"\\\.\d+\\\.", lambda _: r"\.\1\.", re.escape(f"network.{tensor.parts[0].ours}"))
            rules[f"^{theirs}"] = f"^{ours}"
    return [WeightRenaming(theirs, ours) for theirs, ours in rules.items()]


def _register(family: str, config: type[HubConfig]) -> type[HubModel]:
    """The model class of one family, named as its published one, known to the Auto classes with its config class."""
    name = FAMILIES[family].architecture
    model = type(name, (HubModel,), {"config_class": config, "__module__": __name__})
    globals().update({config.__name__: config, name: model})  # pickle finds classes by module and name
    AutoConfig.register(family, config, exist_ok=True)
    for auto in (AutoModel, AutoModelForMaskedLM, AutoModelForCausalLM):
        auto.register(config, model, exist_ok=True)
    register_checkpoint_conversion_mapping(name, renamings(family), overwrite=True)
    return model


CONFIGS: dict[str, type[HubConfig]] = {
    family: type(f"{value.architecture}Config", (HubConfig,), {"model_type": family, "__module__": __name__})
    for family, value in FAMILIES.items()
    if family not in (*FUSED, *NATIVE)
}
MODELS: dict[str, type[HubModel]] = {family: _register(family, config) for family, config in CONFIGS.items()}
"""The transformers classes of each family."""
DLMConfig, DLMForMaskedLM = CONFIGS["dlm"], MODELS["dlm"]
