import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import dlm
from dlm.models import finding, load
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
