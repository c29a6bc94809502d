import json

import pytest
import torch
from safetensors.torch import load_file

import dlm
from dlm.cli.export import main
from dlm.models import adapters, load, portable

from ..models import tiny


def test_a_bundled_model_in_its_own_dtype(tmp_path, capsys):
    out = tmp_path / "out"
    assert main(["pico", "--to", str(out)]) == 0
    line = f"{out}: family dlm, AutoModel.from_pretrained('{out}', trust_remote_code=True)\n"
    assert capsys.readouterr().out == line
    assert {path.name for path in out.glob("*.py")} == set(portable.CODE)
    assert {tensor.dtype for tensor in load_file(out / "model.safetensors").values()} == {torch.bfloat16}
    ours, back = load("pico", device="cpu"), load(out, device="cpu")
    talk = [{"role": "user", "content": "x"}]
    assert back.config == ours.config and back.chat(talk) == ours.chat(talk)
    assert all(torch.equal(a, b) for a, b in zip(ours.network.parameters(), back.network.parameters(), strict=True))


def test_another_family_dtype_and_shards(tmp_path, capsys):
    tiny.model("qwen3", attention="bidirectional").save(tmp_path / "in")
    words = ["--family", "qwen3", "--dtype", "float16", "--max-shard-size", "1e-5"]
    assert main([str(tmp_path / "in"), "--to", str(tmp_path / "out"), *words]) == 0
    assert "family qwen3, AutoModelForCausalLM.from_pretrained(" in capsys.readouterr().out
    hub = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (hub["model_type"], hub["torch_dtype"]) == ("qwen3", "float16")
    assert len(list((tmp_path / "out").glob("model-*.safetensors"))) > 1
    assert main([str(tmp_path / "out"), "--to", str(tmp_path / "out2")]) == 0
    assert json.loads((tmp_path / "out2" / "config.json").read_text())["torch_dtype"] == "float16"


def test_an_adapter_is_merged(tmp_path):
    pytest.importorskip("peft")

    lm, ids = tiny.model("dlm"), tiny.tokens()
    lm.save(tmp_path / "base")
    adapters.attach(lm.network, 2, 4.0, base=str(tmp_path / "base"))
    for name, parameter in lm.network.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(0))
    lm.save(tmp_path / "adapter")
    assert main([str(tmp_path / "adapter"), "--to", str(tmp_path / "a")]) == 0
    assert main([str(tmp_path / "base"), "--adapter", str(tmp_path / "adapter"), "--to", str(tmp_path / "b")]) == 0
    with torch.no_grad():
        for folder in ("a", "b"):
            found = load(tmp_path / folder, device="cpu").network(ids)
            torch.testing.assert_close(found, lm.network(ids), rtol=1e-4, atol=1e-4)


def test_targets_are_checked_before_the_model_is_read(tmp_path, monkeypatch, capsys):
    tiny.model("dlm").save(tmp_path / "in")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").write_text("")
    monkeypatch.setattr(dlm, "load", None)
    assert main([str(tmp_path / "in"), "--to", str(tmp_path / "out")]) == 2
    assert main([str(tmp_path / "in"), "--to", str(tmp_path / ("long" * 100))]) == 2
    err = capsys.readouterr().err
    assert "holds 'thesis.tex' and is no checkpoint" in err and "cannot be written (File name too long)" in err


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"{dlm.__version__}\n"
