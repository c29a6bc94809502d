"""Good checkpoints spoilt in one way each: sizes, types, JSON, safetensors headers, indexes, adapters."""

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

Spoil = Callable[[Path], None]


def config(**changes: Any) -> Spoil:
    """Keys of config.json changed; `...` takes one away."""
    return values("config.json", **changes)


def values(file: str, **changes: Any) -> Spoil:
    def spoil(folder: Path) -> None:
        found = json.loads((folder / file).read_text()) if (folder / file).is_file() else {}
        changed = {key: value for key, value in {**found, **changes}.items() if value is not ...}
        (folder / file).write_text(json.dumps(changed))

    return spoil


def raw(file: str, content: str | bytes) -> Spoil:
    return lambda folder: (
        (folder / file).write_bytes(content if isinstance(content, bytes) else content.encode()) and None
    )


def moe(**changes: Any) -> Spoil:
    def spoil(folder: Path) -> None:
        found = json.loads((folder / "config.json").read_text())
        config(moe={**found["moe"], **changes})(folder)

    return spoil


def header(change: Callable[[dict[str, Any]], Any], file: str = "model.safetensors", size: int | None = None) -> Spoil:
    """A safetensors header rewritten; the data stay, or the file becomes `size` bytes long (a hole, not written)."""

    def spoil(folder: Path) -> None:
        content = (folder / file).read_bytes()
        length = struct.unpack("<Q", content[:8])[0]
        found = json.loads(content[8 : 8 + length])
        found = change(found) or found
        text = json.dumps(found).encode()
        (folder / file).write_bytes(struct.pack("<Q", len(text)) + text + content[8 + length :])
        if size is not None:
            with (folder / file).open("r+b") as handle:
                handle.truncate(8 + len(text) + size)

    return spoil


def indexed(**files: Any) -> Spoil:
    """The weights behind an index that names these files."""

    def spoil(folder: Path) -> None:
        (folder / "model.safetensors").rename(folder / "part.safetensors")
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))

    return spoil


def twice(folder: Path) -> None:
    indexed(a="part.safetensors", b="other.safetensors")(folder)
    (folder / "other.safetensors").write_bytes((folder / "part.safetensors").read_bytes())


def all_of(*spoils: Spoil) -> Spoil:
    return lambda folder: [spoil(folder) for spoil in spoils] and None


def first(found: dict[str, Any]) -> dict[str, Any]:
    return found[min(key for key in found if key != "__metadata__")]


def huge(found: dict[str, Any]) -> dict[str, Any]:
    """One tensor of four terabytes."""
    return {"model.embed_tokens.weight": {"dtype": "F32", "shape": [2**20, 2**20], "data_offsets": [0, 2**42]}}


WIDE = {"hidden_size": 2**20, "vocab_size": 2**20, "tie_word_embeddings": True, "num_hidden_layers": 1}
DEEP = '{"a":' * 100_000
NESTED = '{"a":' * 100 + "1" + "}" * 100
CHECKPOINTS: dict[str, tuple[str, Spoil]] = {
    "a million layers": ("dlm", config(num_hidden_layers=1_000_000)),
    "four thousand layers": ("dlm", config(num_hidden_layers=4_000)),
    "no layers": ("dlm", config(num_hidden_layers=0)),
    "fewer than no layers": ("llama", config(num_hidden_layers=-1)),
    "layers as text": ("llama", config(num_hidden_layers="2")),
    "layers as a list": ("llama", config(num_hidden_layers=[2])),
    "half a layer": ("dlm", config(num_hidden_layers=1.5)),
    "layers as a float": ("llama", config(num_hidden_layers=2.0)),
    "layers as true": ("dlm", config(num_hidden_layers=True)),
    "layers as null": ("llama", config(num_hidden_layers=None)),
    "a width of a million": ("dlm", config(hidden_size=1_000_000)),
    "a width of 2**40": ("dlm", config(hidden_size=2**40)),
    "a width of 2**4000": ("llama", config(hidden_size=2**4000)),
    "a width of nothing": ("llama", config(hidden_size=0)),
    "a width as NaN": ("llama", config(hidden_size=float("nan"))),
    "a width as infinity": ("dlm", config(hidden_size=float("inf"))),
    "a feed-forward of 2**20": ("llama", config(intermediate_size=2**20)),
    "a feed-forward of 2**31": ("llama", config(intermediate_size=2**31)),
    "a vocabulary of 2**24": ("dlm", config(vocab_size=2**24)),
    "a vocabulary of 2**60": ("llama", config(vocab_size=2**60)),
    "a vocabulary as an object": ("dlm", config(vocab_size={})),
    "no vocabulary": ("dlm", config(vocab_size=0)),
    "no heads": ("llama", config(num_attention_heads=0, head_dim=...)),
    "heads that do not divide": ("llama", config(num_attention_heads=3, head_dim=...)),
    "key heads that do not divide": ("dlm", config(num_key_value_heads=3)),
    "a million heads": ("dlm", config(num_attention_heads=2**20, num_key_value_heads=2**20)),
    "an odd head": ("dlm", config(head_dim=5)),
    "heads of llada that do not divide": ("llada", config(n_heads=3)),
    "no heads of llada": ("llada", config(n_heads=0)),
    "a ratio as text": ("llada", config(mlp_hidden_size=..., mlp_ratio="4")),
    "an infinite ratio": ("llada", config(mlp_hidden_size=..., mlp_ratio=float("inf"))),
    "positions of 2**31": ("dlm-learned", config(max_position_embeddings=2**31)),
    "a table of 2**30 positions": ("dlm-learned", config(max_position_embeddings=2**30)),
    "a theta of nothing": ("dlm", config(rope_theta=0)),
    "a theta below nothing": ("llama", config(rope_theta=-1.0)),
    "an infinite theta": ("dlm", config(rope_theta=float("inf"))),
    "a theta as text": ("llama", config(rope_theta="10000")),
    "a theta that is too small": ("llama", config(rope_theta=1e-300)),
    "a scaling as a list": ("llama", config(rope_scaling=[1])),
    "a scaling of a list": ("llama", config(rope_scaling={"rope_type": ["yarn"], "factor": 2})),
    "a scaling by nothing": ("llama", config(rope_scaling={"rope_type": "linear", "factor": 0})),
    "a scaling by text": ("llama", config(rope_scaling={"rope_type": "linear", "factor": "2"})),
    "a yarn of theta 1": ("llama", config(rope_theta=1.0, rope_scaling={"rope_type": "yarn", "factor": 2.0})),
    "a yarn without turns": ("llama", config(rope_scaling={"rope_type": "yarn", "factor": 2.0, "beta_fast": 0})),
    "a part of a head below nothing": ("llama", config(partial_rotary_factor=-0.5)),
    "a part of a head as text": ("llama", config(partial_rotary_factor="half")),
    "rope parameters as text": ("dlm", config(rope_parameters="yarn")),
    "an epsilon below nothing": ("dlm", config(rms_norm_eps=-1e-6)),
    "an epsilon as NaN": ("llama", config(rms_norm_eps=float("nan"))),
    "a deviation as infinity": ("dlm", config(initializer_range=float("inf"))),
    "a bias as text": ("llama", config(attention_bias="yes")),
    "a tie as a number": ("llama", config(tie_word_embeddings=3)),
    "blocks of 2**31": ("sdar", config(block_size=2**31)),
    "blocks of 2**21": ("sdar", config(block_size=2**21)),
    "blocks below nothing": ("sdar", config(block_size=-4)),
    "blocks of no length": ("dlm", config(attention="block_causal", block_length=0)),
    "an unknown attention": ("dlm", config(attention="sideways")),
    "kinds of layers as a number": ("llama", config(layer_types=3)),
    "a window as a list": ("llama", config(use_sliding_window=True, sliding_window=[4], max_window_layers=[1])),
    "a mask outside": ("dlm", config(mask_token_id=10**9)),
    "a mask as text": ("dlm", config(mask_token_id="[MASK]")),
    "a mask of 2**70": ("llama", config(mask_token_id=2**70)),
    "an end as an object": ("dlm", config(eos_token_id={"id": 1})),
    "ends as texts": ("dlm", config(eos_token_id=["</s>"])),
    "an end as true": ("dlm", values("generation_config.json", eos_token_id=True)),
    "a family as a list": ("dlm", config(model_type=["dlm"])),
    "a family as an object": ("dlm", config(model_type={"a": NESTED})),
    "a million experts": ("dlm-moe", moe(num_experts=1_000_000)),
    "four thousand experts": ("dlm-moe", moe(num_experts=4_000)),
    "experts as text": ("dlm-moe", moe(num_experts="8")),
    "more experts than there are": ("dlm-moe", moe(num_experts_per_tok=9)),
    "groups that do not divide": ("dlm-moe", moe(n_group=3)),
    "groups of one": ("dlm-moe", moe(n_group=8)),
    "no groups": ("dlm-moe", moe(n_group=0)),
    "a factor as NaN": ("dlm-moe", moe(routed_scaling_factor=float("nan"))),
    "experts below nothing": ("llada2_moe", config(num_experts=-8)),
    "many experts of llada2": ("llada2_moe", config(num_experts=4_096, n_group=1, topk_group=1)),
    "layers of llada-moe": ("llada_moe", config(num_hidden_layers=10**9, moe_layer_freq=...)),
    "a plan of layers as text": ("llada_moe", config(moe_layer_freq="11")),
    "a mixture as a list": ("dlm", config(moe=[1])),
    "quantised weights": ("dlm", config(quantization_config={"bits": 4})),
    "deep JSON": ("dlm", raw("config.json", DEEP)),
    "nested JSON": ("dlm", config(rope_scaling=json.loads(NESTED))),
    "a list for a config": ("dlm", raw("config.json", "[]")),
    "bytes for a config": ("dlm", raw("config.json", b"\xff\xfe\x00")),
    "a number of a million digits": ("dlm", raw("config.json", '{"hidden_size": ' + "9" * 10**6 + "}")),
    "forty megabytes of spaces": ("dlm", raw("config.json", " " * 40 * 2**20)),
    "deep JSON for generation": ("dlm", raw("generation_config.json", DEEP)),
    "a list for generation": ("dlm", raw("generation_config.json", "[1]")),
    "deep JSON for an index": ("dlm", all_of(indexed(), raw("model.safetensors.index.json", DEEP))),
    "an empty index": ("dlm", indexed()),
    "an index with numbers": ("dlm", indexed(a=3)),
    "an index with a path above": ("dlm", indexed(a="../../x.safetensors")),
    "an index with an absolute path": ("dlm", indexed(a="/etc/passwd.safetensors")),
    "an index with another system's path": ("dlm", indexed(a="C:\\x.safetensors")),
    "an index with pickled weights": ("dlm", indexed(a="part.bin")),
    "an index with missing files": ("dlm", indexed(a="part.safetensors", b="none.safetensors")),
    "the same tensors in two files": ("dlm", twice),
    "a header of 2**63 bytes": ("dlm", raw("model.safetensors", struct.pack("<Q", 2**63))),
    "a header longer than its file": ("dlm", raw("model.safetensors", struct.pack("<Q", 10**6) + b"{}")),
    "a header of 40 megabytes": ("dlm", raw("model.safetensors", struct.pack("<Q", 40 * 2**20) + b"{" + b" " * 40 * 2**20)),
    "a deep header": ("dlm", raw("model.safetensors", struct.pack("<Q", len(DEEP)) + DEEP.encode())),
    "a header that is a list": ("dlm", raw("model.safetensors", struct.pack("<Q", 2) + b"[]")),
    "an empty file of weights": ("dlm", raw("model.safetensors", b"")),
    "offsets that overlap": ("dlm", header(lambda h: first(h).update(data_offsets=[0, 8]))),
    "offsets beyond the file": ("dlm", header(lambda h: first(h).update(data_offsets=[2**50, 2**50 + 8]))),
    "offsets below nothing": ("dlm", header(lambda h: first(h).update(data_offsets=[-8, 0]))),
    "a shape below nothing": ("dlm", header(lambda h: first(h).update(shape=[-1]))),
    "a shape of 2**80": ("dlm", header(lambda h: first(h).update(shape=[2**40, 2**40]))),
    "weights in 8 bits": ("dlm", header(lambda h: first(h).update(dtype="I32"))),
    "an unknown dtype": ("dlm", header(lambda h: first(h).update(dtype="F7"))),
    "no tensors": ("dlm", header(lambda h: {"__metadata__": {}}, size=0)),
    "a hole of four terabytes": ("dlm", all_of(config(**WIDE), header(huge, size=2**42))),
    "a truth of four terabytes": (
        "tied",
        all_of(config(vocab_size=2**20, hidden_size=2**20, num_attention_heads=1, num_key_value_heads=1, head_dim=2,
                      intermediate_size=1, num_hidden_layers=1), lambda folder: truthful(folder)),
    ),
    "deep JSON for a tokenizer": ("text", raw("tokenizer.json", DEEP)),
    "an empty tokenizer": ("text", raw("tokenizer.json", "{}")),
    "deep JSON for a tokenizer's config": ("text", raw("tokenizer_config.json", DEEP)),
    "a list for a tokenizer's config": ("text", raw("tokenizer_config.json", "[]")),
    "a mask that is a list": ("text", raw("tokenizer_config.json", '{"mask_token": ["[MASK]"]}')),
    "code for a tokenizer": (
        "text",
        all_of(
            lambda folder: (folder / "tokenizer.json").unlink(),
            raw("vocab.json", '{"a": 0}'),
            raw("tokenizer_config.json", '{"auto_map": {"AutoTokenizer": ["evil.Tok", null]}}'),
            raw("evil.py", "raise SystemExit('code of a folder was run')"),
        ),
    ),
    "deep JSON for an adapter": ("adapter", raw("adapter_config.json", DEEP)),
    "an adapter of a rank of a billion": ("adapter", values("adapter_config.json", r=10**9)),
    "an adapter of a rank of a thousand": ("adapter", values("adapter_config.json", r=1000)),
    "an adapter of no rank": ("adapter", values("adapter_config.json", r=0)),
    "an adapter of a rank as text": ("adapter", values("adapter_config.json", r="4")),
    "an adapter of a base as a list": ("adapter", values("adapter_config.json", base_model_name_or_path=["a"])),
    "an adapter that imports": ("adapter", values("adapter_config.json", megatron_config={"a": 1}, megatron_core="os")),
    "an adapter with a pattern that never ends": ("adapter", values("adapter_config.json", target_modules="(.*a)*(.*a)*(.*a)*(.*a)*b")),
    "an adapter with patterns of ranks": ("adapter", values("adapter_config.json", rank_pattern={"(a+)+$": 4})),
    "an adapter of a million layers": ("adapter", values("adapter_config.json", layer_replication=[[0, 10**6]])),
    "an adapter of weights that end early": ("adapter", raw("adapter_model.safetensors", b"\x08")),
}  # fmt: skip


def truthful(folder: Path) -> None:
    """Weights of four terabytes, all of them declared rightly: a hole in the file."""
    wide, at = 2**20, 0
    shapes = {"model.embed_tokens.weight": [wide, wide], "model.norm.weight": [wide]}
    layer = "model.layers.0."
    shapes |= {layer + name + "_layernorm.weight": [wide] for name in ("input", "post_attention")}
    shapes |= {layer + f"self_attn.{name}_proj.weight": [2, wide] for name in "qkv"}
    shapes |= {layer + "self_attn.o_proj.weight": [wide, 2], layer + "mlp.down_proj.weight": [wide, 1]}
    shapes |= {layer + f"mlp.{name}_proj.weight": [1, wide] for name in ("gate", "up")}
    found = {}
    for name, shape in shapes.items():
        size = 4 * shape[0] * (shape[1] if len(shape) > 1 else 1)
        found[name] = {"dtype": "F32", "shape": shape, "data_offsets": [at, at + size]}
        at += size
    header(lambda _: found, size=at)(folder)
