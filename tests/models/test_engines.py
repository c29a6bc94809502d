"""Folders for other engines: taken as they lie where the engine reads them so, refused by name where it would not."""

import json

import pytest

from dlm.cli.export import main
from dlm.errors import UserError
from dlm.models import load
from dlm.models.engines import ENGINES, require_served

from . import tiny

SDAR = {"mask_token_id": 151669, "vocab_size": 151_700, "block_length": 4}
LLADA2 = {"mask_token_id": 156895, "vocab_size": 156_900, "block_length": 32}


def folder_of(tmp_path, family="sdar", code=True, **changes):
    """A checkpoint as it is published: with the file of its configuration class, which is never run."""
    fields = {"sdar": SDAR, "llada2_moe": LLADA2}.get(family, {})
    lm, place = tiny.model(family, **{**fields, **changes}), tmp_path / "in"
    lm.save(place)
    if code:
        (place / "configuration_sdar.py").write_text("raise SystemExit('it was run')\n")
        hub = json.loads((place / "config.json").read_text())
        hub["auto_map"] = {"AutoConfig": "configuration_sdar.SDARConfig"}
        (place / "config.json").write_text(json.dumps(hub))
    return place


@pytest.mark.parametrize(
    ("engine", "family", "words"),
    [
        ("sglang", "sdar", "sglang.launch_server --model-path"),
        ("sglang", "llada2_moe", "--dllm-algorithm"),
        ("lmdeploy", "sdar", "--dllm-block-length 4"),
    ],
)
def test_folders_that_are_served(tmp_path, capsys, engine, family, words):
    source, out = folder_of(tmp_path, family), tmp_path / "out"
    assert main([str(source), "--to", str(out), "--for", engine]) == 0
    line = capsys.readouterr().out.splitlines()[1]
    assert line.startswith(f"{engine}: ") and words in line and str(out) in line
    hub = json.loads((out / "config.json").read_text())
    served = ENGINES[engine].architectures[hub["architectures"][0]]
    assert all(hub[key] is not None for key in served.keys) and hub["mask_token_id"] == served.mask_token_id
    assert (out / "configuration_sdar.py").is_file() and load(out).config == load(source).config


@pytest.mark.parametrize(
    ("engine", "family", "changes", "words"),
    [
        ("lmdeploy", "llada2_moe", {}, "serves no LLaDA2MoeModelLM"),
        ("sglang", "llada", {}, "serves no LLaDAModelLM"),
        ("lmdeploy", "Dream", {}, "serves no DreamModel"),
        ("sglang", "qwen3", {}, "serves no Qwen3ForCausalLM"),
        ("sglang", "dlm", {}, "serves no"),
        ("sglang", "sdar", {"mask_token_id": 9}, "takes 151669 for the mask of SDARForCausalLM, and here it is 9"),
        ("sglang", "sdar", {"block_length": 8}, "in blocks of 4, and this model was trained on 8"),
        ("sglang", "sdar", {"code": False}, "own configuration class, and this folder has none"),
    ],
)
def test_others_are_refused_by_name(tmp_path, capsys, engine, family, changes, words):
    source, out = folder_of(tmp_path, family, **{"code": family in ("sdar", "llada2_moe"), **changes}), tmp_path / "out"
    assert main([str(source), "--to", str(out), "--for", engine]) == 2
    assert words in capsys.readouterr().err and not out.exists()


def test_what_is_missing_is_named(tmp_path):
    place = folder_of(tmp_path)
    hub = json.loads((place / "config.json").read_text())
    del hub["num_key_value_heads"]
    (place / "config.json").write_text(json.dumps(hub))
    with pytest.raises(UserError, match=r"needs num_key_value_heads in config.json"):
        require_served(place, "sglang")
    with pytest.raises(UserError, match="engine = 'vllm' is not known; known: sglang, lmdeploy"):
        require_served(place, "vllm")
