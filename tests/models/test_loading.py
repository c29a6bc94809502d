import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import dlm
from dlm.models import device, finding, load, loading
from dlm.models import lm as lm_module
from tests.refusals import refused

from . import tiny


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny.model("Dream").save(tmp_path / "m")
    return tmp_path / "m"


def edit(folder: Path, name: str = "config.json", **changes: object) -> None:
    hub = json.loads((folder / name).read_text()) if (folder / name).is_file() else {}
    values = {k: v for k, v in (hub | changes).items() if v is not None}
    (folder / name).write_text(json.dumps(values))


def test_dtype_and_device(folder):
    edit(folder, torch_dtype="bfloat16")
    assert load(folder).dtype == torch.float32 or torch.cuda.is_available()
    assert load(folder, device="cpu").dtype == torch.float32
    assert load(folder, device="cpu:0").device == torch.device("cpu")
    assert load(folder, dtype="bfloat16", device="cpu").dtype == torch.bfloat16
    assert load(folder, dtype=torch.float64, device="cpu").dtype == torch.float64
    refused("dtype='int8'", load, folder, dtype="int8")
    refused("device='warp'", load, folder, device="warp")


def test_low_precision_on_disk_is_converted_on_the_way_in(tmp_path):
    lm = tiny.model("llada2_moe")
    lm.save(tmp_path / "m", dtype="bfloat16")
    stored = load_file(tmp_path / "m" / "model.safetensors")
    bias = stored.pop("model.layers.1.mlp.gate.expert_bias")
    assert bias.dtype == torch.float32  # rounding it would change which experts are chosen
    assert {t.dtype for t in stored.values()} == {torch.bfloat16}
    back = load(tmp_path / "m", dtype="float32", device="cpu")
    assert torch.equal(back.network.embed.weight, lm.network.embed.weight.bfloat16().float())
    half = load(tmp_path / "m", dtype="bfloat16", device="cpu").network
    assert half.state_dict()["layers.1.mlp.router.bias"].dtype == torch.float32


def test_shards(tmp_path):
    lm = tiny.model("dlm-moe")
    lm.save(tmp_path / "m", max_shard_size=10_000)
    shards = sorted(p.name for p in (tmp_path / "m").glob("*.safetensors"))
    assert len(shards) > 2
    index = json.loads((tmp_path / "m" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == set(shards)
    assert index["metadata"]["total_size"] == 4 * sum(t.numel() for t in lm.network.state_dict().values())
    ids = tiny.tokens()
    with torch.no_grad():
        tiny.near(load(tmp_path / "m", device="cpu").network(ids), lm.network(ids))
    (tmp_path / "m" / shards[1]).unlink()
    refused(rf"{shards[1]} is missing", load, tmp_path / "m")


def test_saving_again_removes_stale_weights_and_keeps_other_files(tmp_path):
    lm = tiny.model("dlm")
    lm.save(tmp_path / "m", max_shard_size=5_000)
    (tmp_path / "m" / "notes.txt").write_text("mine")
    lm.save(tmp_path / "m")
    names = {"config.json", "generation_config.json", "model.safetensors", "notes.txt"}
    assert {p.name for p in (tmp_path / "m").iterdir()} == names
    assert [p.name for p in tmp_path.iterdir()] == ["m"]


def test_loading_and_decoding_do_without_what_compiles():
    """torch._dynamo takes longer to import than everything of ours."""
    code = "import sys, dlm; lm = dlm.load('pico', device='cpu'); dlm.generate(lm, ['a'], gen_length=4); print('torch._dynamo' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"


@pytest.mark.slow
def test_a_killed_save_leaves_what_was_there(tmp_path):
    lm, ids = tiny.model("Dream"), tiny.tokens()
    lm.save(tmp_path / "m")
    script = """
import os, sys
import dlm.atomic
from dlm.models import load
lm = load(sys.argv[1], device="cpu")
lm.network.embed.weight.data.zero_()
dlm.atomic._ready = lambda *_: os.kill(os.getpid(), 9)  # everything is written, nothing is in place
lm.save(sys.argv[1])
"""
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path / "m")], env=os.environ, check=False)
    assert done.returncode == -9
    with torch.no_grad():
        tiny.near(load(tmp_path / "m", device="cpu").network(ids), lm.network(ids))


def test_special_tokens_come_from_config_then_generation_config_then_family(folder):
    lm = load(folder, device="cpu")
    assert (lm.mask_id, lm.eos_id, lm.pad_id) == (40, 1, 2)
    assert json.loads((folder / "generation_config.json").read_text())["mask_token_id"] == 40
    edit(folder, mask_token_id=None, eos_token_id=[5, 6], pad_token_id=None)
    edit(folder, "generation_config.json", mask_token_id=41, pad_token_id=-1)
    lm = load(folder, device="cpu")
    assert (lm.mask_id, lm.eos_id, lm.pad_id) == (41, 5, 5)
    lm.save(folder)  # the list survives
    assert json.loads((folder / "config.json").read_text())["eos_token_id"] == [5, 6]
    edit(folder, mask_token_id=None)
    (folder / "generation_config.json").unlink()
    lm = load(folder, device="cpu")  # Dream's own mask lies outside this vocabulary
    assert lm.mask_id is None
    refused(r"no mask token.*mask_token_id", lm.require_mask_id)
    refused(r"no tokenizer.*tokenizer\.json", lm.encode, "x")


def test_tokenizer_travels_with_the_model(folder, tmp_path):
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

    backend = Tokenizer(models.WordLevel({f"w{i}": i for i in range(40)}, unk_token="w0"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens([AddedToken("<|mask|>"), AddedToken("<|end|>")])
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"mask_token": "<|mask|>", "eos_token": "<|end|>"}))
    edit(folder, mask_token_id=None, eos_token_id=None)
    (folder / "generation_config.json").unlink()
    lm = load(folder, device="cpu")
    assert (lm.mask_id, lm.eos_id) == (40, 41)
    assert lm.encode("w3 w4 <|mask|>") == [3, 4, 40]
    lm.save(tmp_path / "copy")
    assert load(tmp_path / "copy", device="cpu").encode("w3 w4 <|mask|>") == [3, 4, 40]
    assert "40" not in repr(lm)
    assert "42 tokens" in repr(lm)


def rewrite(folder: Path, change: dict[str, torch.Tensor | None]) -> None:
    file = folder / "model.safetensors"
    tensors = {**load_file(file), **change}
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, file)


def test_tensors_that_do_not_fit_are_named(folder):
    name = "model.layers.1.mlp.up_proj.weight"
    rewrite(folder, {name: torch.zeros(3, 16)})
    refused(rf"model.safetensors: tensor '{name}' has shape \(3, 16\).*\(24, 16\)", load, folder)
    rewrite(folder, {name: None})
    refused(rf"lacks 1 of 27 tensors, first '{name}' of shape \(24, 16\)", load, folder)
    rewrite(folder, {name: torch.zeros(24, 16), "model.layers.1.mlp.extra.weight": torch.zeros(1)})
    refused(r"has a tensor 'model.layers.1.mlp.extra.weight'", load, folder)
    rewrite(
        folder, {"model.layers.1.mlp.extra.weight": None, "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2)}
    )
    load(folder)


def test_a_tied_head_stored_twice_is_read_once(tmp_path):
    lm = tiny.model("Fast_dLLM_Qwen")
    lm.save(tmp_path)
    rewrite(tmp_path, {"lm_head.weight": torch.zeros(48, 16)})
    assert torch.equal(load(tmp_path, device="cpu").network.embed.weight, lm.network.embed.weight)


def test_other_broken_folders(folder):
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text("{}")
    refused("no weight_map", load, folder)
    (folder / "model.safetensors.index.json").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"")
    refused("convert them to safetensors", load, folder)


def test_names_that_lead_nowhere(folder, monkeypatch):
    monkeypatch.setattr(finding, "bundled", lambda: {"sudoku": folder})
    assert dlm.load("sudoku", device="cpu").config.model_type == "Dream"
    refused("no such folder", load, folder / "nowhere")
    refused("neither a folder nor a hub id", load, "bad name!/x")


def test_downloads_are_safe_and_keep_the_way_to_their_code(folder, monkeypatch):
    import huggingface_hub

    asked = []
    edit(folder, auto_map={"AutoModel": "modeling.Model"})
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name, **more: asked.append((name, more)) or folder)
    lm = load("owner/name", revision="v2", device="cpu")
    assert asked[0][0] == "owner/name"
    assert asked[0][1]["revision"] == "v2"
    assert not any(pattern.endswith((".bin", ".py", "*")) for pattern in asked[0][1]["allow_patterns"])
    assert lm.settings["auto_map"] == {"AutoModel": "owner/name--modeling.Model"}


@pytest.mark.gpu
def test_straight_to_the_gpu(folder):
    lm, ids = load(folder), tiny.tokens()
    assert lm.device.type == "cuda"
    with torch.no_grad():
        far, near = lm.network(ids.cuda()).cpu(), load(folder, device="cpu").network(ids)
    assert (far - near).abs().max() < 1e-4


# ---- room


@pytest.fixture
def small_gpu(monkeypatch):
    """A GPU by name, of 8 GiB; what is free of it can be set. Nothing can be put there."""

    def free(number: int) -> None:
        monkeypatch.setattr(device, "free_memory", lambda where: number)
        monkeypatch.setattr(loading, "free_memory", lambda where: number)

    for module in (device, loading):
        monkeypatch.setattr(module, "whole_memory", lambda where: 8 * 2**30)
    for module in (loading, lm_module):
        monkeypatch.setattr(module, "pick_device", torch.device)
    return free


FIXES = r"quantise them \(quantize\), use a smaller dtype, tensor_parallel over several devices, or another device"


def test_weights_that_do_not_fit_into_what_is_free_are_refused_before_they_are_read(folder, small_gpu, monkeypatch):
    monkeypatch.setattr("dlm.models.weights._allocate", None)  # is not called
    needed = sum(p.numel() * 2 for p in tiny.model("Dream").network.parameters())
    small_gpu(needed - 1)
    text = rf"the weights take 0.0 GiB, and cuda has 0.0 GiB free of 8.0 GiB in all; {FIXES}"
    refused(text, load, folder, device="cuda", dtype="bfloat16")
    small_gpu(needed)
    with pytest.raises(TypeError, match="'NoneType' object is not callable"):
        load(folder, device="cuda", dtype="bfloat16")


def test_a_model_that_would_not_fit_is_not_moved(folder, small_gpu):
    small_gpu(2**10)
    lm = load(folder, device="cpu")
    refused(f"model .* GiB free of 8.0 GiB in all; {FIXES}", lm.to, "cuda")
    assert lm.device.type == "cpu"


def test_quantised_weights_need_room_for_their_bits(folder, small_gpu, monkeypatch):
    network = tiny.model("Dream").network
    matrices = sum(m.weight.numel() for m in network.layers.modules() if type(m) is torch.nn.Linear)
    needed = 2 * (sum(p.numel() for p in network.parameters()) - matrices) + matrices // 2
    monkeypatch.setattr(loading, "require", lambda *_: None)
    monkeypatch.setattr(loading, "quantise", lambda *_: None)
    small_gpu(needed - 1)
    refused(f"as nf4: the weights take .* GiB free of 8.0 GiB in all; {FIXES}", load, folder, **NF4)
    small_gpu(needed)
    load(folder, **NF4)


NF4 = {"device": "cuda", "dtype": "bfloat16", "quantize": "nf4"}


@pytest.mark.parametrize("place", ["weights._allocate", "loading.quantise"])
@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory"),
        MemoryError(),
    ],
)
def test_no_memory_while_reading_says_what_to_lower(place, error, folder, small_gpu, monkeypatch):
    def none_left(*_: object) -> None:
        raise error

    monkeypatch.setattr(f"dlm.models.{place}", none_left)
    monkeypatch.setattr(loading, "require", lambda *_: None)
    small_gpu(3 * 2**30)
    given = NF4 if "quantise" in place else {"device": "cuda"}
    text = rf"cuda ran out of memory while 0.0 GiB of weights were read: 3.0 GiB of 8.0 are left; {FIXES}"
    refused(text, load, folder, **given)


def test_other_errors_while_reading_stay_what_they_are(folder, monkeypatch):
    def broken(*_: object) -> None:
        raise RuntimeError("a kernel is missing")

    monkeypatch.setattr("dlm.models.weights._allocate", broken)
    with pytest.raises(RuntimeError, match="a kernel is missing"):
        load(folder, device="cpu")
