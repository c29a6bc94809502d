"""Drafts: their forward against a loop written from the formulas, their folders, and what does not fit."""

import json
import math

import pytest
import torch
from safetensors.torch import load_file, save_file

import dlm
from dlm.models.draft import Draft
from dlm.models.draft_config import default_layer_ids, is_draft
from dlm.models.draft_hub import draft_config_from_hub

from ..inference.tiny import byte_tokenizer, tiny_lm
from .tiny import near

CAUSAL = {"model_type": "llama", "attention": "causal", "shifted_logits": True, "mask_token_id": None}
SECOND = {"conv_kernel_size": 3, "conv_group_size": 4, "selector_rank": 5, "selector_top_k": 6}
KINDS = {
    "plain": {},
    "second": SECOND,
    "sliding causal": {"windows": (4, None), "causal": (True, False)},
    "sliding to both sides": {"windows": (5, 5), "causal": (False, False)},
    "scaled": {"input_embedding_scale": 2.0, "output_multiplier": 0.5, "final_logit_softcapping": 3.0},
}


def target(**more) -> dlm.LM:
    return tiny_lm(1, **{**CAUSAL, "num_hidden_layers": 5, "mask_in_softmax": False, **more})


def draft(lm: dlm.LM, kind: str, **more) -> Draft:
    made = Draft.fresh(lm, num_layers=2, block_size=6, mask_token_id=9, **KINDS[kind], **more)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in made.parameters():  # far from their defaults
            parameter += 0.2 * torch.randn(parameter.shape, generator=generator)
    return made.eval()


def norm(x, weight, eps=1e-6):
    return weight * x / math.sqrt(float((x * x).mean()) + eps)


def turned(x, position, theta=10_000.0):
    """One head rotated to its position, channel pair by channel pair."""
    half, out = len(x) // 2, x.clone()
    for i in range(half):
        angle = position * theta ** (-2 * i / len(x))
        out[i] = x[i] * math.cos(angle) - x[i + half] * math.sin(angle)
        out[i + half] = x[i + half] * math.cos(angle) + x[i] * math.sin(angle)
    return out


def by_hand(made: Draft, ids, features, anchor):
    """Logits of one block's rows, row by row and head by head in fp64. Context stands at positions 0 … anchor - 1."""
    w = {name: x.double() for name, x in made.state_dict().items()}
    c, shape = made.config, made.config.network
    h, g, e = shape.num_attention_heads, shape.num_key_value_heads, shape.head_dim
    embed, head = (x.weight.detach().double() for x in (made.target.network.embed, made.target.network.lm_head))
    context = [norm(w["fc.weight"] @ f.double(), w["hidden_norm.weight"]) for f in features]
    x = [embed[i] * c.input_embedding_scale for i in ids]

    def convolved(rows, of, name, second):
        if not c.selects:
            return rows
        kernel = w[f"{name}.base_kernel"][second]
        sizes = c.conv_kernel_size, len(rows[0]) // c.conv_group_size
        out = []
        for i, row in enumerate(of):
            own = (w[f"{name}.kernel_projection.weight"] @ row).view(2, *sizes)[second]
            total = torch.zeros_like(rows[0])
            for back in range(sizes[0]):
                if i - back >= 0:
                    total += (kernel[back] + own[back].repeat_interleave(c.conv_group_size)) * rows[i - back]
            out.append(total)
        return out

    for n in range(shape.num_hidden_layers):
        own = {key.removeprefix(f"layers.{n}."): value for key, value in w.items() if key.startswith(f"layers.{n}.")}
        normed = [norm(row, own["attn_norm.weight"]) for row in x]
        inner = convolved(normed, normed, f"layers.{n}.attention_conv", 0)
        places = [*range(anchor), *(anchor + i for i in range(len(x)))]
        sources, found = [*context, *inner], []
        for i, row in enumerate(inner):
            heads = []
            for a in range(h):
                b = a * g // h
                cut = lambda m, k: m[k * e : (k + 1) * e]  # noqa: E731
                q = turned(norm(cut(own["attn.q_proj.weight"] @ row, a), own["attn.q_norm.weight"]), anchor + i)
                scores, values = [], []
                for place, source in zip(places, sources, strict=True):
                    ahead = place - (anchor + i)
                    window = c.windows[n]
                    if (c.causal[n] and ahead > 0) or (window is not None and abs(ahead) >= window):
                        continue
                    k = turned(norm(cut(own["attn.k_proj.weight"] @ source, b), own["attn.k_norm.weight"]), place)
                    scores.append(float(q @ k) / math.sqrt(e))
                    values.append(cut(own["attn.v_proj.weight"] @ source, b))
                p = torch.tensor(scores, dtype=torch.float64).softmax(0)
                heads.append(sum(share * value for share, value in zip(p, values, strict=True)))
            found.append(own["attn.o_proj.weight"] @ torch.cat(heads))
        found = convolved(found, normed, f"layers.{n}.attention_conv", 1)
        x = [row + more for row, more in zip(x, found, strict=True)]
        normed = [norm(row, own["mlp_norm.weight"]) for row in x]
        inner = convolved(normed, normed, f"layers.{n}.mlp_conv", 0)
        gated = [
            torch.nn.functional.silu(own["mlp.gate_proj.weight"] @ r) * (own["mlp.up_proj.weight"] @ r) for r in inner
        ]
        found = convolved([own["mlp.down_proj.weight"] @ r for r in gated], normed, f"layers.{n}.mlp_conv", 1)
        x = [row + more for row, more in zip(x, found, strict=True)]
    logits = torch.stack([head @ norm(row, w["norm.weight"]) for row in x]) * c.output_multiplier
    cap = c.final_logit_softcapping
    return logits if cap is None else cap * torch.tanh(logits / cap)


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_an_independent_loop(kind):
    lm = target()
    made = draft(lm, kind)
    generator = torch.Generator().manual_seed(5)
    ids, features = [4, 9, 9, 9], torch.randn(7, 2 * 32, generator=generator)
    with torch.no_grad():
        positions = torch.arange(7, 11)[None]
        hidden = made(torch.tensor([ids]), positions, features[None], torch.arange(7)[None])
        found = made.logits(hidden)[0].double()
    assert (found - by_hand(made, ids, features, 7)).abs().max() < 1e-5


def test_blocks_side_by_side_are_blocks_alone():
    """What training does: two blocks in a row, each seeing the context before its anchor, and itself."""
    lm = target()
    made = draft(lm, "second")
    generator = torch.Generator().manual_seed(5)
    features, ids = torch.randn(1, 9, 64, generator=generator), torch.tensor([[4, 9, 9, 7, 9, 9]])
    anchors = [3, 8]
    positions = torch.tensor([[a + i for a in anchors for i in range(3)]])
    allowed = torch.zeros(1, 6, 15, dtype=torch.bool)
    for b, anchor in enumerate(anchors):
        allowed[0, 3 * b : 3 * b + 3, :anchor] = True
        allowed[0, 3 * b : 3 * b + 3, 9 + 3 * b : 12 + 3 * b] = True
    with torch.no_grad():
        together = made(ids, positions, features, torch.arange(9)[None], allowed, block=3)
        for b, anchor in enumerate(anchors):
            mine = slice(3 * b, 3 * b + 3)
            alone = made(ids[:, mine], positions[:, mine], features[:, :anchor], torch.arange(anchor)[None])
            near(together[:, mine], alone)


def test_the_target_gets_no_gradient():
    lm = target()
    made = draft(lm, "plain").train()
    made(torch.tensor([[1, 9]]), torch.tensor([[2, 3]]), torch.randn(1, 2, 64), torch.tensor([[0, 1]])).sum().backward()
    assert lm.network.embed.weight.grad is None
    assert made.fc.weight.grad is not None
    assert not any(name.startswith(("target", "embed", "lm_head")) for name, _ in made.named_parameters())


@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_comes_back_as_it_was(kind, tmp_path):
    lm = target()
    made = draft(lm, kind)
    made.save(tmp_path / "draft")
    names = set(load_file(tmp_path / "draft" / "model.safetensors"))
    assert len(names) == 3 + 11 * 2 + (4 * 2 + 3 if kind == "second" else 0)
    assert not any("embed" in name or "head" in name for name in names)
    again = dlm.load_draft(tmp_path / "draft", lm)
    assert again.config == made.config
    assert all(torch.equal(a, b) for a, b in zip(made.parameters(), again.parameters(), strict=True))
    again.save(tmp_path / "draft")  # over itself
    assert dlm.load_draft(tmp_path / "draft", lm).config == made.config


def test_what_the_format_cannot_say_is_not_written(tmp_path):
    for more in ({"windows": (5, 3)}, {"windows": (5, 5), "causal": (True, False)}):
        with pytest.raises(dlm.UserError, match="z-lab's format cannot say"):
            Draft.fresh(target(), num_layers=2, **more).save(tmp_path / "draft")


def test_codebooks_stored_as_embeddings_are_read(tmp_path):
    lm = target()
    made = draft(lm, "second")
    made.save(tmp_path / "draft")
    file = tmp_path / "draft" / "model.safetensors"
    tensors = {f"{k}.weight" if k.endswith("codebook") else k: v for k, v in load_file(file).items()}
    save_file(tensors, file, metadata={"format": "pt"})
    again = dlm.load_draft(tmp_path / "draft", lm)
    assert torch.equal(again.candidate_selector.predecessor_codebook, made.candidate_selector.predecessor_codebook)


FEW = (3, 9, 10, 40, 63)


@pytest.mark.parametrize("kind", ["plain", "scaled"])
def test_a_draft_of_few_tokens_scores_them_as_one_of_all_does_and_no_others(kind, tmp_path):
    lm = target()
    whole, few = draft(lm, kind), draft(lm, kind, tokens=FEW[::-1])
    few.load_state_dict(whole.state_dict())
    hidden = torch.randn(4, 32, generator=torch.Generator().manual_seed(1))
    rest = [token for token in range(64) if token not in FEW]
    for made in (few, saved(few, lm, tmp_path)):
        near(made.logits(hidden)[:, FEW], whole.logits(hidden)[:, FEW])
        assert made.logits(hidden)[:, rest].isneginf().all()
        assert made.drafts(torch.arange(64)).nonzero()[:, 0].tolist() == list(FEW)
        assert made.place(torch.tensor(FEW)).tolist() == [0, 1, 2, 3, 4]
        assert made.body().lm_head.weight.shape == (5, 32)


def saved(made: Draft, lm: dlm.LM, folder) -> Draft:
    made.save(folder / "draft")
    assert load_file(folder / "draft" / "model.safetensors")["d2t"].tolist() == [3, 8, 8, 37, 59]
    return dlm.load_draft(folder / "draft", lm)


def test_a_head_in_the_folder_must_be_the_target_s(tmp_path):
    lm = target()
    draft(lm, "plain", tokens=FEW).save(tmp_path / "draft")
    file = tmp_path / "draft" / "model.safetensors"
    head = lm.network.lm_head.weight.detach()[list(FEW)].clone()
    for scale in (1.0, 1.5):
        save_file(load_file(file) | {"lm_head.weight": scale * head}, file, metadata={"format": "pt"})
        if scale == 1:
            dlm.load_draft(tmp_path / "draft", lm)
        else:
            with pytest.raises(dlm.UserError, match="is not these tokens' rows of 'tiny''s head"):
                dlm.load_draft(tmp_path / "draft", lm)
    edited(tmp_path / "draft", dflash_config={"mask_token_id": 9, "target_layer_ids": [1, 2]})
    with pytest.raises(dlm.UserError, match="config.json has no draft_vocab_size"):
        dlm.load_draft(tmp_path / "draft", lm)


@pytest.mark.parametrize(
    ("tokens", "size", "says"),
    [
        (None, 5, "no file has the tensor 'd2t'"),
        ([3, 8, 8, 37], 5, r"is I64 of shape \(4,\); draft_vocab_size asks for I64, \(5,\)"),
        ([3.0, 8.0, 8.0, 37.0, 59.0], 5, "is F32 of shape"),
        ([3, 8, 8, 37, 60], 5, "should give ascending tokens of the 64"),
        ([3, 1, 8, 37, 59], 5, "should give ascending tokens"),
        ([-1, 8, 8, 37, 59], 5, "should give ascending tokens"),
        ([3, 8, 8, 37, 59], 65, "draft_vocab_size = 65 is more than the vocabulary of 64"),
        ([3, 8, 8, 37, 59], 0, "draft_vocab_size"),
        ([3, 8, 8, 37, 59], "few", "draft_vocab_size"),
    ],
)
def test_tokens_of_a_draft_that_cannot_be_are_refused(tokens, size, says, tmp_path):
    lm = target()
    draft(lm, "plain", tokens=FEW).save(tmp_path / "draft")
    file = tmp_path / "draft" / "model.safetensors"
    tensors = {name: x for name, x in load_file(file).items() if name != "d2t"}
    save_file(tensors | ({} if tokens is None else {"d2t": torch.tensor(tokens)}), file, metadata={"format": "pt"})
    edited(tmp_path / "draft", dflash_config={"mask_token_id": 9, "draft_vocab_size": size, "target_layer_ids": [1, 2]})
    with pytest.raises(dlm.UserError, match=says):
        dlm.load_draft(tmp_path / "draft", lm)


SHAPE = {"hidden_size": 64, "num_attention_heads": 4, "head_dim": 16, "intermediate_size": 128, "vocab_size": 300_000}


def published(depth: int, layers: int, **more) -> dict:
    """A config.json as z-lab and SpecForge write it, at another width."""
    dflash = more.pop("dflash", None)
    hub = {"model_type": "qwen3", "architectures": ["DFlashDraftModel"], "num_target_layers": depth, **SHAPE, **more}
    return {**hub, "num_hidden_layers": layers, **({} if dflash is None else {"dflash_config": dflash})}


@pytest.mark.parametrize(
    ("hub", "ids", "block"),
    [
        (published(36, 5, block_size=16, dflash={"mask_token_id": 151669}), (1, 9, 17, 25, 33), 16),
        (published(32, 5, dflash={"mask_token_id": 248070}), (1, 8, 15, 22, 29), 16),
        (published(40, 5, dflash={"mask_token_id": 248070}), (1, 10, 19, 28, 37), 16),
        (published(64, 5, dflash={"mask_token_id": 248070}), (1, 16, 31, 46, 61), 16),
        (
            published(40, 8, dflash={"mask_token_id": 7, "target_layer_ids": [1, 10, 19, 28, 37], "block_size": 8}),
            (1, 10, 19, 28, 37),
            8,
        ),
        (published(24, 1, mask_token_id=5), (12,), 16),
    ],
)
def test_published_configs_name_these_layers(hub, ids, block):
    config = draft_config_from_hub(hub)
    assert is_draft(hub)
    assert (config.target_layer_ids, config.block_size) == (ids, block)
    assert config.plain
    assert default_layer_ids(36, 5) == (1, 9, 17, 25, 33)


def test_sliding_layers_are_read_as_z_lab_reads_them():
    kinds = ["sliding_attention"] * 4 + ["full_attention"]
    hub = published(64, 5, layer_types=kinds, sliding_window=2048, dflash={"mask_token_id": 1})
    config = draft_config_from_hub(hub)
    assert config.windows == (2048, 2048, 2048, 2048, None)
    assert config.causal == (True, True, True, True, False)
    assert draft_config_from_hub({**hub, "is_causal": False}).causal == (False,) * 5


def test_speculators_count_layers_from_one():
    inner = {"model_type": "qwen3", "num_hidden_layers": 2, **SHAPE}
    hub = {"speculators_model_type": "dflash", "aux_hidden_state_layer_ids": [2, 10, 18], "mask_token_id": 3}
    config = draft_config_from_hub({**hub, "block_size": 8, "transformer_layer_config": inner})
    assert (config.target_layer_ids, config.block_size, config.mask_token_id) == ((1, 9, 17), 8, 3)
    for size, read in ((100, 100), (300_000, None)):
        config = draft_config_from_hub({**hub, "draft_vocab_size": size, "transformer_layer_config": inner})
        assert config.draft_vocab_size == read


def edited(folder, **changes):
    path = folder / "config.json"
    hub = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in hub.items() if value is not None}))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"dflash_config": None, "architectures": ["Qwen3ForCausalLM"]}, r"no DFlash draft.*dflash_config"),
        ({"num_target_layers": None}, "num_target_layers"),
        ({"num_target_layers": 7}, r"'[^']*draft' does not fit model 'tiny'.*depth.*7, and the model's is 5"),
        ({"vocab_size": 70}, r"vocabulary.*70, and the model's is 64"),
        ({"hidden_size": 64}, r"width.*64, and the model's is 32"),
        ({"dflash_config": {"mask_token_id": 64}}, "mask_token_id = 64 lies outside"),
        ({"dflash_config": {"mask_token_id": None}}, "has no 'mask_token_id'"),
        (
            {"dflash_config": {"mask_token_id": 1, "target_layer_ids": [1, 5]}},
            "has 5, and num_target_layers = 5: layers count",
        ),
        (
            {"dflash_config": {"mask_token_id": 1, "target_layer_ids": "all"}},
            "target_layer_ids = 'all' should be a list",
        ),
        ({"dflash_config": {"mask_token_id": 1, "selector_rank": 4}}, "conv_kernel_size"),
        ({"dflash_config": {"mask_token_id": True}}, "mask_token_id: Input should be a valid integer"),
        ({"is_causal": "no"}, "is_causal = 'no' should be true or false"),
        ({"block_size": 1}, "block_size"),
        ({"layer_types": ["linear_attention", "full_attention"]}, "layer_types"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"num_hidden_layers": 3, "layer_types": None}, "lacks the tensor 'layers.2"),
        ({"intermediate_size": 50}, "has shape"),
    ],
)
def test_what_does_not_fit_is_said(changes, says, tmp_path):
    lm = target()
    draft(lm, "plain").save(tmp_path / "draft")
    edited(tmp_path / "draft", **changes)
    with pytest.raises(dlm.UserError, match=says):
        dlm.load_draft(tmp_path / "draft", lm)


def test_a_draft_knows_its_tokenizer_and_its_kind_of_target(tmp_path):
    lm = target(vocab_size=258, tokenizer=byte_tokenizer())
    Draft.fresh(lm, num_layers=1).save(tmp_path / "draft")
    dlm.load_draft(tmp_path / "draft", lm)
    other = target(vocab_size=258, tokenizer=byte_tokenizer("<mask>"))
    with pytest.raises(dlm.UserError, match=r"draft' does not fit model 'tiny'.*another tokenizer"):
        dlm.load_draft(tmp_path / "draft", other)
    diffusion = tiny_lm(vocab_size=258, num_hidden_layers=5)
    with pytest.raises(dlm.UserError, match=r"needs a causal target, and llada is bidirectional.*self"):
        dlm.load_draft(tmp_path / "draft", diffusion)
    with pytest.raises(dlm.UserError, match=r"is a draft.*load_draft"):
        dlm.load(tmp_path / "draft")
    with pytest.raises(dlm.UserError, match="no such folder"):
        dlm.load_draft(tmp_path / "nothing", lm)
