from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import dlm
from dlm import UserError
from dlm.evaluation.bound import measure_bound
from dlm.models import convert, finding, save
from dlm.models.packing import pack
from tests.refusals import refused

from . import tiny


def test_a_model_moves_in_place_and_comes_back():
    lm, ids = tiny.model("dlm-moe"), tiny.tokens()
    pack(lm.network)
    with torch.no_grad():
        before = lm.network(ids)
        assert lm.to("float64") is lm
        assert lm.dtype == torch.float64
        torch.testing.assert_close(lm.network(ids), before.double(), rtol=1e-4, atol=1e-4)
        lm.to(torch.bfloat16)
        assert {p.dtype for p in lm.network.parameters()} == {torch.bfloat16}
        assert {b.dtype for b in lm.network.buffers()} == {torch.float32}  # the router's bias decides: never rounded
        assert lm.network(ids).dtype == torch.bfloat16
    assert lm.to("cpu", dtype="float32").dtype == torch.float32
    assert lm.to("auto").device.type == lm.device.type
    assert lm.to() is lm


def test_what_cannot_be_moved_says_so():
    lm = tiny.model("dlm")
    for target in ("int8", torch.int8, "warp", "meta", "cuda:99"):
        refused(r"dtype=|device=", lm.to, target)
    lm.network.layers[0].mlp.up_proj.weight = torch.nn.Parameter(torch.zeros(1, dtype=torch.uint8), requires_grad=False)
    refused(r"quantised.*load it again with dtype='bfloat16'", lm.to, "bfloat16")
    assert lm.to("float32") is lm
    lm = tiny.model("dlm")
    lm.network.group = SimpleNamespace()  # type: ignore[assignment]
    assert lm.to(lm.device) is lm
    if torch.cuda.is_available():
        refused("split over several processes", lm.to, "cuda" if lm.device.type == "cpu" else "cpu")


CALLS = {
    "generate": lambda lm: dlm.generate(lm, ["x"]),
    "infill": lambda lm: dlm.infill(lm, ["[MASK]"]),
    "score": lambda lm: dlm.score(lm, ["x"]),
    "Engine": dlm.Engine,
    "LM": dlm.LM,
    "verify": lambda lm: dlm.replay.verify(lm, None),
    "force": lambda lm: dlm.replay.force(lm, SimpleNamespace(num_steps=0)),
    "fork": lambda lm: dlm.replay.fork(lm, SimpleNamespace(num_steps=0, request_id="a"), 0),
    "convert": convert,
    "save": lambda lm: save(lm, Path("nowhere")),
    "bound": lambda lm: measure_bound(lm, None, length=8),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_name_is_no_model(call):
    for name in ("pico", Path("pico")):
        refused(r'dlm\.load\("pico"\)', call, name)
    refused("expected a loaded model, not None", call, None)


def test_other_things_say_how_they_become_a_model():
    network = tiny.model("dlm").network
    with pytest.raises(UserError, match=r"dlm\.LM\(network, tokenizer\)"):
        dlm.generate(network, ["x"])  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"hf\.unwrap"):
        dlm.generate(torch.nn.Linear(1, 1), ["x"])  # type: ignore[arg-type]


def test_a_misspelt_local_folder_is_no_hub_id(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(finding, "_download", lambda *_: pytest.fail("the hub was asked"))
    for name in ("first", "second", "typo-2"):
        (tmp_path / "runs" / name).mkdir(parents=True)
    refused(r"'runs/typo': no such folder; did you mean runs/typo-2\?", dlm.load, "runs/typo")
    refused(r"no such folder; runs has first, second, typo-2", dlm.load, "runs/xyz")
    refused(r"no such folder; did you mean runs/first\?", dlm.load, "runs/firts/epoch-1")
    refused(r"no such folder.*bundled models", dlm.load, "runs-2/")


def test_what_names_an_owner_beside_a_folder_of_that_name_is_found_by_its_revision(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "owner").mkdir()
    asked = []
    monkeypatch.setattr(finding, "_download", lambda *given: asked.append(given) or tmp_path)
    refused("revision", finding.find, "owner/model")
    assert finding.find("owner/model", "main") == tmp_path
    assert [given[:2] for given in asked] == [("owner/model", "main")]


@pytest.mark.parametrize("name", ["x" * 5000 + "/y", "\0/a", "~nobody-has-this-name/x", None, 3, ["pico"]])
def test_names_that_no_file_system_takes(name):
    with pytest.raises(UserError):
        dlm.load(name)  # type: ignore[arg-type]


def test_the_bundled_models_are_listed_with_what_they_are():
    there = dlm.available()
    assert list(there) == ["pico", "pico-block", "pico-causal", "pico-draft", "sudoku"]
    assert all(there.values())
    assert "Python" in there["pico"]


def test_a_card_gives_its_first_sentence(tmp_path, monkeypatch):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    (tmp_path / "a" / "README.md").write_text("---\nx: y\n---\n\n# a\n\nIt is v1.5 of a. More.\n")
    monkeypatch.setattr(finding, "bundled", lambda: {"a": tmp_path / "a", "b": tmp_path / "b"})
    assert dlm.available() == {"a": "It is v1.5 of a.", "b": ""}
