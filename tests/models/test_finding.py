"""Names that lead nowhere, and the bundled models: what users are told instead of an attempt to download."""

import pytest

import dlm
from dlm import UserError
from dlm.models import finding
from tests.refusals import refused


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


def test_without_the_hub_both_readings_are_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"no such folder in .*, and as a hub id it cannot be downloaded"):
        dlm.load("someone/something")  # the tests run offline


@pytest.mark.parametrize("name", ["x" * 5000 + "/y", "\0/a", "~nobody-has-this-name/x", None, 3, ["pico"]])
def test_names_that_no_file_system_takes(name):
    with pytest.raises(UserError):
        dlm.load(name)  # type: ignore[arg-type]


def test_the_bundled_models_are_listed_with_what_they_are():
    there = dlm.available()
    assert list(there) == ["pico", "sudoku"]
    assert all(there.values())
    assert "Python" in there["pico"]


def test_a_card_gives_its_first_sentence(tmp_path, monkeypatch):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    (tmp_path / "a" / "README.md").write_text("---\nx: y\n---\n\n# a\n\nIt is v1.5 of a. More.\n")
    monkeypatch.setattr(finding, "bundled", lambda: {"a": tmp_path / "a", "b": tmp_path / "b"})
    assert dlm.available() == {"a": "It is v1.5 of a.", "b": ""}
