"""GGUF files: networks equal to the same weights as safetensors and to transformers' reading, whatever they are packed to."""

import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import dlm
from dlm import UserError
from dlm.models import finding, gguf_weights
from dlm.models.loading import config_of

from . import gguf_files, tiny

gguf = gguf_files.gguf

PACKINGS = ("F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")
BLOCKS = ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "IQ2_XXS", "TQ1_0", "MXFP4")
ALL = torch.ones(2, 11, dtype=torch.bool)


def written(folder: Path, name: str = "llama", packing: str = "F32", **more: Any) -> Path:
    options = {key: more.pop(key) for key in ("keys", "extra", "tokens") if key in more}
    return gguf_files.write(gguf_files.network(name, **more), gguf_files.CASES[name][0], folder, packing, **options)


def logits(lm: dlm.LM) -> torch.Tensor:
    """Of all tokens below the mask, which only diffusion files name."""
    with torch.no_grad():
        return lm.predict(tiny.tokens(), ALL)[:, :40]


@pytest.mark.parametrize("name", gguf_files.CASES)
def test_a_file_is_the_network_that_a_folder_is(name: str, tmp_path: Path) -> None:
    lm, twin = dlm.load(written(tmp_path, name)), dlm.load(tmp_path / "twin")
    diffuses = name.startswith(("llada", "dream"))
    unsaid = {"initializer_range"} | (set() if diffuses else {"mask_token_id"})
    assert lm.config.model_dump(exclude=unsaid) == twin.config.model_dump(exclude=unsaid)
    assert lm.config.model_type == gguf_files.network(name).config.model_type
    state = twin.network.state_dict()
    assert all(torch.equal(tensor, state[key]) for key, tensor in lm.network.state_dict().items())
    tiny.near(logits(lm), logits(twin))
    assert lm.eos_id == 1
    assert lm.pad_id == 2
    assert lm.mask_id == (40 if diffuses else None)


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
def test_transformers_reads_the_same(name: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    wide = {"head_dim": 128} if name == "qwen3" else {}  # which transformers takes for granted
    file = written(tmp_path, name, "Q8_0", **wide)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=file.name, dtype=torch.float32).eval()
    ids, lm = tiny.tokens(), dlm.load(file)
    with torch.no_grad():
        expected = theirs(ids).logits
    found = lm.predict(ids, ALL).reshape(*ids.shape, -1)
    tiny.near(found[:, 1:], expected[:, :-1])  # ours are logits of the token at each place, theirs of the next


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("name", ["llama", "dream"])
def test_packed_weights_are_what_the_package_unpacks(
    name: str, packing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gguf_weights, "CHUNK", 640)  # ten rows of a width of 64, and an odd rest
    file = written(tmp_path, name, packing)
    lm, twin = dlm.load(file), dlm.load(tmp_path / "twin")
    state = twin.network.state_dict()
    assert all(torch.equal(tensor, state[key]) for key, tensor in lm.network.state_dict().items())
    assert lm.settings["torch_dtype"] == {"F16": "float16"}.get(packing, "bfloat16")


@pytest.mark.parametrize("packing", BLOCKS)
def test_blocks_that_only_llama_cpp_packs(packing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = gguf.GGMLQuantizationType[packing]
    block, size = gguf.GGML_QUANT_SIZES[kind]
    packed = np.random.default_rng(0).integers(0, 0x3C, (40, 512 // block * size), dtype=np.uint8)  # no infinite scale
    writer = gguf.GGUFWriter(tmp_path / "one.gguf", "llama")
    writer.add_tensor("blk.0.ffn_up.weight", packed, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    monkeypatch.setattr(gguf_weights, "CHUNK", 512 * 7)
    weights = gguf_weights.Weights(tmp_path / "one.gguf", torch.device("cpu"))
    assert weights.get_slice("blk.0.ffn_up.weight").get_shape() == [40, 512]
    expected = gguf.dequantize(packed, kind)
    assert np.isfinite(expected).all()
    assert np.array_equal(weights.get_tensor("blk.0.ffn_up.weight").numpy(), expected)


SCALINGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "linear": (
        {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0},
        {"rope_type": "linear", "factor": 4.0},
    ),
    "linear as it was": ({"llama.rope.scale_linear": 2.0}, {"rope_type": "linear", "factor": 2.0}),
    "yarn": (
        {
            "llama.rope.scaling.type": "yarn",
            "llama.rope.scaling.factor": 4.0,
            "llama.rope.scaling.original_context_length": 16,
            "llama.rope.scaling.yarn_beta_fast": 16.0,
        },
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 16.0},
    ),
    "none": ({"llama.rope.scaling.type": "none"}, {}),
}


@pytest.mark.parametrize("name", SCALINGS)
def test_a_stretched_rotation(name: str, tmp_path: Path) -> None:
    keys, scaling = SCALINGS[name]
    file = written(tmp_path, "llama", keys=keys)
    expected = gguf_files.network("llama", rope_scaling=scaling or None)
    lm = dlm.load(file)
    assert lm.config.rope_scaling == (scaling or None)
    tiny.near(logits(lm), logits(expected))


def divisors(
    theta: float, width: int, factor: float, low: float = 1.0, high: float = 4.0, old: int = 8192
) -> np.ndarray:
    """`rope_freqs` as llama.cpp's conversion of Llama 3 computes it: by wavelengths."""
    waves = 2 * np.pi * theta ** (np.arange(0, width, 2) / width)
    smooth = (old / waves - low) / (high - low)
    between = 1 / ((1 - smooth) / factor + smooth)
    return np.where(waves < old / high, 1, np.where(waves > old / low, factor, between)).astype(np.float32)


def test_divided_frequencies_are_llama_3s_scaling(tmp_path: Path) -> None:
    fields = {"rope_theta": 5e5, "head_dim": 32}
    table = divisors(5e5, 32, 8.0)
    assert 1 < table[len(table) // 2] < 8 or len(set(table)) > 2
    lm = dlm.load(written(tmp_path, "llama", extra={"rope_freqs.weight": table}, **fields))
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    from transformers.models.llama import LlamaConfig

    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    config = LlamaConfig(
        hidden_size=128,
        num_attention_heads=4,
        rope_parameters={**scaling, "original_max_position_embeddings": 8192, "rope_theta": 5e5},
    )
    expected, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    assert lm.network.rope is not None
    torch.testing.assert_close(lm.network.rope[0], expected)
    assert lm.config.rope_scaling == {**scaling, "original_max_position_embeddings": 8192}


def test_divisors_of_another_kind_are_refused_and_ones_are_none(tmp_path: Path) -> None:
    plain = written(tmp_path, "llama", extra={"rope_freqs.weight": np.ones(8, np.float32)})
    assert dlm.load(plain).config.rope_scaling is None
    odd = np.linspace(1, 8, 8, dtype=np.float32)
    with pytest.raises(UserError, match=r"model\.gguf: rope_freqs\.weight holds divisors"):
        dlm.load(written(tmp_path, "llama", extra={"rope_freqs.weight": odd}))


# --- the whole way through --------------------------------------------------------------------------------------------


def test_tokenizer_template_and_stops(tmp_path: Path) -> None:
    lm = dlm.load(written(tmp_path, "llama"))
    assert lm.encode("*+<|im_end|>") == [9, 10, 3]
    assert lm.encode("*<tool>*") == [9, 41, 9]
    assert lm.decode([9, 41, 3, 9]) == "*<tool>*"
    assert lm.chat([{"role": "user", "content": "hi"}]) == "user:hi<|im_end|>>"
    assert lm.generation["eos_token_id"] == [1, 3]  # end-of-text as stated, end of a turn by its name
    assert lm.require_tokenizer().eos_token == "<|endoftext|>"
    assert lm.require_tokenizer().special_id("<|im_end|>") == 3
    assert lm.require_tokenizer().backend.token_to_id("[PAD42]") is None


@pytest.mark.parametrize("name", gguf_files.CASES)
def test_an_exported_file_is_a_folder_of_its_family(name: str, tmp_path: Path) -> None:
    from dlm.cli.export import main

    lm = dlm.load(written(tmp_path, name, "Q5_0"))
    assert main([str(tmp_path / "model.gguf"), "--to", str(tmp_path / "out"), "--dtype", "float32"]) == 0
    assert gguf_files.settings(tmp_path / "out")["model_type"] == lm.config.model_type
    again = dlm.load(tmp_path / "out")
    assert again.config == lm.config
    state = again.network.state_dict()
    assert all(torch.equal(tensor, state[key]) for key, tensor in lm.network.state_dict().items())
    assert again.encode("*+<|im_end|>") == lm.encode("*+<|im_end|>")
    assert again.chat([{"role": "user", "content": "hi"}]) == "user:hi<|im_end|>>"
    assert again.generation["eos_token_id"] == [1, 3]


def test_commands_traces_and_training_take_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from dlm.cli.infer import main

    file, store = written(tmp_path, "dream"), tmp_path / "traces.db"
    short = ["--sampler.gen_length", "4", "--sampler.steps", "2", "--json", "--quiet"]
    assert main(["--model", str(file), "--prompt", "*+", *short, "--trace", "--trace.store", str(store)]) == 0
    said = capsys.readouterr().out
    with dlm.TraceStore(store) as traces:
        (trace,) = traces
    assert trace.meta["model"] == str(file)
    assert dlm.replay.verify(dlm.load(file), trace).identical
    assert said
    assert config_of(file).num_hidden_layers == 2


def test_parts_of_a_model_that_was_split(tmp_path: Path) -> None:
    whole = dlm.load(written(tmp_path, "llama"))
    reader = gguf.GGUFReader(tmp_path / "model.gguf")
    half = len(reader.tensors) // 2
    for number, tensors in enumerate((reader.tensors[:half], reader.tensors[half:])):
        writer = gguf.GGUFWriter(tmp_path / f"part-{number + 1:05}-of-00002.gguf", "llama")
        if number == 0:
            for key, field in reader.fields.items():
                if not key.startswith("GGUF.") and key != "general.architecture":
                    gguf_files.add(writer, key, field.contents())
        else:
            writer.kv_data[0].pop("general.architecture")
        writer.add_uint16("split.no", number)
        writer.add_uint16("split.count", 2)
        for tensor in tensors:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    again = dlm.load(tmp_path / "part-00001-of-00002.gguf")
    state = again.network.state_dict()
    assert all(torch.equal(tensor, state[key]) for key, tensor in whole.network.state_dict().items())
    with pytest.raises(UserError, match=r"one of 2 parts: give the first"):
        dlm.load(tmp_path / "part-00002-of-00002.gguf")
    (tmp_path / "part-00002-of-00002.gguf").unlink()
    with pytest.raises(UserError, match=r"part-00002-of-00002\.gguf is missing"):
        dlm.load(tmp_path / "part-00001-of-00002.gguf")


# --- what is refused --------------------------------------------------------------------------------------------------

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "experts": ({"llama.expert_count": 8}, r"llama\.expert_count = 8 should be missing or 0"),
    "sliding window": ({"llama.attention.sliding_window": 16}, r"sliding_window = 16 should be missing or 0"),
    "other attention": (
        {"llama.attention.causal": False},
        r"attention\.causal = False should be true, as llama models",
    ),
    "another scaling": ({"llama.rope.scaling.type": "longrope"}, r"'longrope' should be none, linear or yarn"),
    "values of another width": ({"llama.attention.value_length": 8}, r"value_length = 8 should be 16"),
    "heads a layer": ({"llama.attention.head_count_kv": [2, 2]}, r"head_count_kv is a list of 2"),
    "no width": ({"llama.embedding_length": None}, r"embedding_length and llama\.attention\.head_count should be"),
    "no layers": ({"llama.block_count": None}, r"has no 'num_hidden_layers'"),
    "more layers": ({"llama.block_count": 3}, r"model\.gguf lacks 9 of 30 tensors, first 'blk\.2\.attn_norm\.weight'"),
    "another size": ({"llama.feed_forward_length": 80}, r"'blk\.0\.ffn_\w+\.weight' has shape .*; metadata asks for"),
    "text for a number": ({"llama.block_count": "two"}, r"num_hidden_layers = 'two' should be a whole number"),
    "another tokenizer": (
        {"tokenizer.ggml.model": "t5"},
        r"tokenizer\.ggml\.model = 't5' is not supported; known: gpt2, llama",
    ),
    "another cut": (
        {"tokenizer.ggml.pre": "poro"},
        r"tokenizer\.ggml\.pre = 'poro' is not supported; known: gpt-2, smollm",
    ),
    "no cut": ({"tokenizer.ggml.pre": None}, r"tokenizer\.ggml\.pre = 'default' is not supported"),
    "no pair": ({"tokenizer.ggml.merges": ["a b c"]}, r"merges has 'a b c', which is no pair"),
    "a merge of nothing": ({"tokenizer.ggml.merges": ["qq zz"]}, r"its tokenizer is damaged: "),
    "types of fewer": ({"tokenizer.ggml.token_type": [1, 1]}, r"tokens has 48 entries, and token_type 2"),
    "an id outside": ({"tokenizer.ggml.eos_token_id": 99}, r"eos_token_id = 99 lies outside"),
    "a template that is none": ({"tokenizer.chat_template": 3}, r"chat_template = 3 should be a text"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_by_name(name: str, tmp_path: Path) -> None:
    keys, message = REFUSED[name]
    with pytest.raises(UserError, match=message):
        dlm.load(written(tmp_path, "llama", keys=keys))


def test_unknown_and_missing_tensors(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"a tensor 'blk\.0\.attn_sinks\.weight' that a llama network"):
        dlm.load(written(tmp_path, "llama", extra={"blk.0.attn_sinks.weight": np.ones(4, np.float32)}))
    file = written(tmp_path, "qwen2", extra={"blk.0.x": np.ones(4, np.float64)})
    with pytest.raises(UserError, match=r"'blk\.0\.x' is stored as F64, which the gguf package cannot unpack"):
        dlm.load(file)


def test_without_a_tokenizer_ids_are_taken(tmp_path: Path) -> None:
    lm = dlm.load(written(tmp_path, "llama", tokens=False))
    assert lm.tokenizer is None
    assert len(dlm.generate(lm, [[5, 6, 7]], gen_length=4, block_length=4)[0].tokens) == 4
    with pytest.raises(UserError, match="no tokenizer"):
        dlm.generate(lm, ["text"], gen_length=4, block_length=4)


def test_the_extra_is_named_where_it_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = written(tmp_path, "llama")
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(UserError, match=r"pip install 'dlm\[gguf\]'"):
        dlm.load(file)
    assert config_of(file).hidden_size == 64  # settings and tokenizers do without


def test_files_that_are_none(tmp_path: Path) -> None:
    (tmp_path / "text.gguf").write_text("hello")
    (tmp_path / "empty.gguf").touch()
    with pytest.raises(UserError, match=r"empty\.gguf cannot be read"):
        dlm.load(tmp_path / "empty.gguf")
    with pytest.raises(UserError, match=r"no such file; did you mean .*text\.gguf or "):
        dlm.load(str(tmp_path / "txt.gguf"))
    with pytest.raises(UserError, match=r"no config\.json, so it is not a checkpoint: give the file, .*empty\.gguf"):
        dlm.load(tmp_path)
    (tmp_path / "old.gguf").write_bytes(b"GGUF" + (1).to_bytes(4, "little") + bytes(16))
    with pytest.raises(UserError, match="GGUF of version 1"):
        dlm.load(tmp_path / "old.gguf")
    (tmp_path / "big.gguf").write_bytes(b"GGUF" + (3).to_bytes(4, "big") + bytes(16))
    with pytest.raises(UserError, match="big-endian"):
        dlm.load(tmp_path / "big.gguf")


def test_a_file_without_its_name_is_known_by_its_first_bytes(tmp_path: Path) -> None:
    blob = written(tmp_path, "llama").rename(tmp_path / "sha256-0123")
    assert dlm.load(blob).config.model_type == "llama"


def test_files_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(finding, "_download", lambda *given: asked.append(given) or tmp_path)
    written(tmp_path, "llama").rename(tmp_path / "m-Q4_0.gguf")
    assert dlm.load("owner/name/m-Q4_0.gguf", revision="v1").config.model_type == "llama"
    with pytest.raises(UserError, match=r"the hub's owner/name has no big-00001-of-00003\.gguf"):
        dlm.load("owner/name/big-00001-of-00003.gguf")
    assert asked == [("owner/name", "v1", ["m-Q4_0.gguf"]), ("owner/name", None, ["big-*-of-00003.gguf"])]


def test_damage_ends_in_a_user_error(tmp_path: Path) -> None:
    file = written(tmp_path, "llama", "Q4_0")
    good, drawn = file.read_bytes(), random.Random(0)
    start = min(tensor.data_offset for tensor in gguf.GGUFReader(file).tensors)
    for cut in [*range(0, start, 211), start + 5, len(good) - 64]:
        (tmp_path / "cut.gguf").write_bytes(good[:cut])
        with pytest.raises(UserError):
            dlm.load(tmp_path / "cut.gguf")
    refused = 0
    for number in range(400):
        spoilt = bytearray(good)
        for _ in range(drawn.choice((1, 1, 4))):
            spoilt[drawn.randrange(4, start)] = drawn.choice((0, 1, 8, 9, 127, 255, drawn.randrange(256)))
        (tmp_path / f"{number}.gguf").write_bytes(spoilt)
        try:
            dlm.load(tmp_path / f"{number}.gguf")
        except UserError:
            refused += 1
        (tmp_path / f"{number}.gguf").unlink()
    assert refused > 100
