"""Every family: its logits against an independent reference, its configuration and its weights there and back."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from dlm import UserError
from dlm.models import FAMILIES, Family, ModelConfig, Transformer, load
from dlm.models.families import config_from_hub, config_to_hub, qwen2, shape
from dlm.models.settings import Settings
from tests.refusals import refused

from . import oracle, tiny

PUBLISHED = ["llada", "llada-gqa", "llada_moe", "Dream", "sdar", "llada2_moe", "Fast_dLLM_Qwen"]


@pytest.mark.parametrize("case", PUBLISHED)
def test_logits_are_those_of_the_paper(case, tmp_path):
    tiny.model(case).save(tmp_path / "m")
    lm = load(tmp_path / "m", dtype="float32", device="cpu")
    ids = tiny.tokens()
    with torch.no_grad():
        ours = lm.network(ids).double()
    for row, out in zip(ids.tolist(), ours, strict=True):
        assert (out - torch.from_numpy(oracle.logits(tmp_path / "m", row))).abs().max() < 1e-4


@pytest.mark.parametrize("case", list(tiny.CASES))
def test_save_then_load_gives_the_same_model(case, tmp_path):
    lm, ids = tiny.model(case), tiny.tokens()
    lm.save(tmp_path / "m")
    back = load(tmp_path / "m", dtype="float32", device="cpu")
    assert back.config == lm.config
    with torch.no_grad():
        tiny.near(back.network(ids), lm.network(ids))
    back.save(tmp_path / "again")
    first, second = (load_file(tmp_path / name / "model.safetensors") for name in ("m", "again"))
    assert {k: (v.shape, v.dtype) for k, v in first.items()} == {k: (v.shape, v.dtype) for k, v in second.items()}
    assert all(torch.equal(first[name], second[name]) for name in first)
    one, two = (json.loads((tmp_path / name / "config.json").read_text()) for name in ("m", "again"))
    assert one == two


def test_weights_have_their_published_names_and_shapes(tmp_path):
    tiny.model("llada2_moe").save(tmp_path / "m")
    found = {name: tuple(t.shape) for name, t in load_file(tmp_path / "m" / "model.safetensors").items()}
    assert found["model.layers.0.attention.query_key_value.weight"] == ((4 + 2 * 2) * 8, 16)
    assert found["model.layers.1.mlp.experts.7.down_proj.weight"] == (16, 12)
    assert found["model.layers.1.mlp.gate.expert_bias"] == (8,)
    assert "model.layers.0.mlp.gate.weight" not in found
    tiny.model("llada").save(tmp_path / "l")
    names = set(load_file(tmp_path / "l" / "model.safetensors"))
    stems = ["q_proj", "k_proj", "v_proj", "attn_out", "ff_proj", "up_proj", "ff_out", "attn_norm", "ff_norm"]
    ends = {f"model.transformer.{name}.weight" for name in ("wte", "ln_f", "ff_out")}
    assert names == {f"model.transformer.blocks.{i}.{s}.weight" for i in range(2) for s in stems} | ends


def test_llada2_reads_stacked_experts_too(tmp_path):
    lm, ids = tiny.model("llada2_moe"), tiny.tokens()
    lm.save(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    for kind in ("gate_proj", "up_proj", "down_proj"):
        parts = [tensors.pop(f"model.layers.1.mlp.experts.{e}.{kind}.weight") for e in range(8)]
        tensors[f"model.layers.1.mlp.experts.{kind}"] = torch.stack(parts)
    save_file(tensors, tmp_path / "model.safetensors")
    hub = json.loads((tmp_path / "config.json").read_text()) | {"model_type": "llada2_moe_veomni"}
    (tmp_path / "config.json").write_text(json.dumps(hub))
    with torch.no_grad():
        tiny.near(load(tmp_path, dtype="float32", device="cpu").network(ids), lm.network(ids))


# Values of the published configurations that decide the size, and the size by hand.
LLADA_8B = {"model_type": "llada", "d_model": 4096, "n_layers": 32, "n_heads": 32, "n_kv_heads": 32}
LLADA_8B |= {"mlp_hidden_size": 12288, "embedding_size": 126464, "vocab_size": 126464, "mask_token_id": 126336}
LLADA_8B |= {"max_sequence_length": 4096, "rope_theta": 500000.0, "include_qkv_bias": False, "weight_tying": False}
DREAM_7B = {"model_type": "Dream", "hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28}
DREAM_7B |= {"num_key_value_heads": 4, "intermediate_size": 18944, "vocab_size": 152064, "mask_token_id": 151666}
DREAM_7B |= {"rope_theta": 1000000.0}
SDAR_4B = {"model_type": "sdar", "hidden_size": 2560, "num_hidden_layers": 36, "num_attention_heads": 32}
SDAR_4B |= {"num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 9728, "vocab_size": 151936, "block_size": 4}
SDAR_4B |= {"use_sliding_window": False, "max_window_layers": 36}
LLADA2_MINI = {"model_type": "llada2_moe_veomni", "hidden_size": 2048, "num_hidden_layers": 20}
LLADA2_MINI |= {"num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 128, "rotary_dim": 64}
LLADA2_MINI |= {"intermediate_size": 5120, "first_k_dense_replace": 1, "moe_intermediate_size": 512, "num_experts": 256}
LLADA2_MINI |= {"num_experts_per_tok": 8, "num_shared_experts": 1, "n_group": 8, "topk_group": 4, "vocab_size": 157184}
LLADA2_MINI |= {"score_function": "sigmoid"}


def attention_size(d: int, heads: int, groups: int, width: int) -> int:
    return d * width * (heads + 2 * groups) + heads * width * d


def whole_size(vocab: int, d: int, layers: int, layer: int) -> int:
    """Two tables of tokens, a norm, and layers with two norms each."""
    return 2 * vocab * d + d + layers * (layer + 2 * d)


SIZES = [
    (LLADA_8B, 8_015_581_184),
    (DREAM_7B, whole_size(152064, 3584, 28, attention_size(3584, 28, 4, 128) + (28 + 8) * 128 + 3 * 3584 * 18944)),
    (SDAR_4B, whole_size(151936, 2560, 36, attention_size(2560, 32, 8, 128) + 2 * 128 + 3 * 2560 * 9728)),
    (LLADA2_MINI, whole_size(157184, 2048, 20, attention_size(2048, 16, 4, 128) + 2 * 128) + (3 * 2048 * 5120 + 19 * (3 * 2048 * 512 * (256 + 1) + 256 * 2048))),
]  # fmt: skip


@pytest.mark.parametrize(("hub", "size"), SIZES, ids=[hub["model_type"] for hub, _ in SIZES])
def test_published_configurations_have_the_right_size(hub, size):
    with torch.device("meta"):
        network = Transformer(config_from_hub(hub))
    assert sum(p.numel() for p in network.parameters()) == size


def test_what_each_family_is():
    sdar, llada2, dream = (config_from_hub(hub) for hub in (SDAR_4B, LLADA2_MINI, DREAM_7B))
    assert (sdar.attention, sdar.block_length, sdar.shifted_logits) == ("block_causal", 4, False)
    assert (sdar.mask_token_id, sdar.mask_in_softmax) == (151669, True)
    assert (llada2.attention, llada2.block_length, llada2.rotary_dim) == ("block_causal", 32, 64)
    assert (llada2.model_type, llada2.mask_token_id, llada2.eos_token_id) == ("llada2_moe", 156895, 156892)
    assert (dream.attention, dream.shifted_logits, dream.head_dim) == ("bidirectional", True, 128)
    assert FAMILIES["qwen3"].shifted_logits
    assert not FAMILIES["dlm"].mask_in_softmax


@pytest.mark.parametrize(
    ("hub", "change"),
    [
        (LLADA_8B, {"alibi": True}),
        (LLADA_8B, {"block_group_size": 2}),
        (LLADA_8B, {"layer_norm_type": "default"}),
        (LLADA_8B, {"activation_type": "gelu"}),
        (LLADA_8B, {"attention_layer_norm": True}),
        (LLADA_8B, {"include_bias": True}),
        (LLADA_8B, {"input_emb_norm": True}),
        (DREAM_7B, {"hidden_act": "gelu"}),
        (DREAM_7B, {"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 4}),
        (SDAR_4B, {"layer_types": ["full_attention", "sliding_attention"]}),
        (SDAR_4B, {"quantization_config": {"quant_method": "fp8"}}),
        (LLADA2_MINI, {"norm_head": True}),
        (LLADA2_MINI, {"score_function": "softmax"}),
    ],
    ids=str,
)
def test_settings_that_are_not_implemented_are_refused_by_name(hub, change):
    key = next(iter(change))
    with pytest.raises(UserError, match=r"some/config\.json") as caught:
        config_from_hub(hub | change, "some/config.json")
    assert key in str(caught.value) or "sliding_window" in str(caught.value)


def test_missing_unknown_and_impossible_values_are_named():
    refused(r"model_type='gpt2'.*known: dlm, llada", config_from_hub, {"model_type": "gpt2"})
    with pytest.raises(UserError, match="hidden_size"):
        config_from_hub({"model_type": "qwen2", "num_attention_heads": 4, "num_hidden_layers": 1, "vocab_size": 9})
    refused("mask_token_id=200000 lies outside", config_from_hub, DREAM_7B | {"mask_token_id": 200_000})


def test_sliding_windows_that_no_layer_uses_are_harmless():
    config_from_hub(DREAM_7B | {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 4})
    config_from_hub(DREAM_7B | {"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 28})


def test_keys_that_are_not_ours_survive(tmp_path):
    lm = tiny.model("llada")
    theirs = {"vocab_size": 45, "flash_attention": True, "auto_map": {"AutoModel": "x.Y"}}
    lm.settings = config_to_hub(lm.config) | theirs
    lm.save(tmp_path / "m")
    hub = json.loads((tmp_path / "m" / "config.json").read_text())
    assert (hub["flash_attention"], hub["auto_map"]) == (True, {"AutoModel": "x.Y"})
    assert (hub["vocab_size"], hub["embedding_size"]) == (45, 48)  # padded: the embedding is larger
    assert load(tmp_path / "m", device="cpu").config.vocab_size == 48


def test_what_a_family_cannot_say_is_saved_as_dlm(tmp_path):
    lm = tiny.model("qwen3", attention="bidirectional", shifted_logits=False)
    lm.save(tmp_path / "m")
    back = load(tmp_path / "m", device="cpu")
    assert back.config == lm.config.model_copy(update={"model_type": "dlm"})
    assert back.config.attention == "bidirectional"


def test_both_spellings_of_rope():
    old = {"rope_theta": 7.0, "rope_scaling": {"type": "linear", "factor": 2.0}}
    new = {"rope_parameters": {"rope_theta": 7.0, "rope_type": "linear", "factor": 2.0}}
    shape = {k: v for k, v in SDAR_4B.items() if k != "rope_theta"}
    for hub in (shape | old, shape | new):
        config = config_from_hub(hub)
        assert config.rope_theta == 7.0 and config.rope_scaling["factor"] == 2.0
    plain = {"rope_parameters": {"rope_theta": 7.0, "rope_type": "default"}}
    assert config_from_hub(shape | plain).rope_scaling is None


def test_a_family_from_outside(tmp_path, monkeypatch):
    """One `Family` and one line in FAMILIES: its folder is saved, found by its model_type, and read again."""

    def read(hub: Settings) -> dict[str, object]:
        return {**qwen2.read_qwen2(hub), "hidden_size": hub.size("width")}

    def write(config: ModelConfig) -> dict[str, object]:
        return {**qwen2.write_qwen2(config), "width": config.hidden_size}

    names = {**shape.QWEN_NAMES, "embed": "words.table", "norm": "words.norm"}
    outside = Family("OutsideLM", read, write, (names,), attention="bidirectional", mask_token_id=5)
    monkeypatch.setitem(FAMILIES, "outside", outside)
    lm, ids = tiny.model("Dream", shifted_logits=False, mask_in_softmax=False, mask_token_id=5), tiny.tokens()
    lm.save(tmp_path / "m", family="outside")
    assert "words.table.weight" in load_file(tmp_path / "m" / "model.safetensors")
    found = load(tmp_path / "m", device="cpu")
    assert (found.config.model_type, found.mask_id) == ("outside", 5)
    with torch.no_grad():
        tiny.near(found.network(ids), lm.network(ids))
