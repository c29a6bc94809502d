import errno
import json
import os
import resource
from pathlib import Path

import pytest
import torch

import dlm
from dlm import UserError, atomic
from dlm.models import convert, load, portable, saving
from tests.refusals import failing, refused

from . import tiny
from .test_converting import letters

PLAIN = {"config.json", "generation_config.json", "model.safetensors"}


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_code_goes_along_with_dlm_folders_only(tmp_path):
    dlm.save(tiny.model("dlm"), tmp_path / "dlm")
    assert names(tmp_path / "dlm") == PLAIN | set(portable.CODE)
    dlm.save(tiny.model("qwen3"), tmp_path / "qwen3")
    dlm.save(tiny.model("llada"), tmp_path / "llada")
    assert names(tmp_path / "qwen3") == names(tmp_path / "llada") == PLAIN
    tiny.model("dlm").save(tmp_path / "bare")
    assert names(tmp_path / "bare") == PLAIN
    assert "auto_map" not in json.loads((tmp_path / "bare" / "config.json").read_text())
    assert "AutoModelForCausalLM.from_pretrained(" in saving.readers(tmp_path / "qwen3")
    assert "trust_remote_code=True)" in saving.readers(tmp_path / "dlm")
    assert "--family dlm brings code along" in saving.readers(tmp_path / "llada")


def test_saved_without_code_from_a_folder_with_code_names_no_code_that_is_not_there(tmp_path):
    dlm.save(tiny.model("dlm"), tmp_path / "a")
    lm = load(tmp_path / "a", device="cpu")
    lm.name = "elsewhere"
    lm.save(tmp_path / "b")
    assert "auto_map" not in json.loads((tmp_path / "b" / "config.json").read_text())


def test_published_code_stays_on_the_hub_or_goes_along_from_the_folder(tmp_path):
    lm = tiny.model("llada")
    dlm.save(lm, tmp_path / "a")
    hub = json.loads((tmp_path / "a" / "config.json").read_text())
    distant = {"AutoModel": "owner/name--modeling_llada.LLaDAModelLM"}
    (tmp_path / "a" / "config.json").write_text(json.dumps({**hub, "auto_map": distant}))
    dlm.save(load(tmp_path / "a", device="cpu"), tmp_path / "b")
    assert json.loads((tmp_path / "b" / "config.json").read_text())["auto_map"] == distant
    fetched = "trust_remote_code=True), which fetches the family's code from the hub"
    assert saving.readers(tmp_path / "b").endswith(fetched)
    (tmp_path / "a" / "config.json").write_text(json.dumps({**hub, "auto_map": {"AutoModel": "modeling_llada.LLaDA"}}))
    for name in ("modeling_llada.py", "configuration_llada.py"):
        (tmp_path / "a" / name).write_text(f"raise SystemExit({name!r})\n")
    (tmp_path / "a" / "secret.py").symlink_to("/etc/passwd")
    dlm.save(load(tmp_path / "a", device="cpu"), tmp_path / "c")
    assert names(tmp_path / "c") == PLAIN | {"modeling_llada.py", "configuration_llada.py"}
    assert saving.readers(tmp_path / "c").endswith("trust_remote_code=True)")


def test_what_is_left_of_an_earlier_tokenizer_is_not_read_in_place_of_the_new_one(tmp_path):
    lm = tiny.model("dlm")
    dlm.save(lm, tmp_path)
    (tmp_path / "chat_template.jinja").write_text("old")
    (tmp_path / "special_tokens_map.json").write_text('{"mask_token": "1"}')
    lm.tokenizer = letters(44, mask_token="A", chat_template="new")
    dlm.save(lm, tmp_path)
    back = load(tmp_path, device="cpu").require_tokenizer()
    assert (back.chat_template, back.mask_token) == ("new", "A")
    assert back.settings["chat_template"] == "new"


def test_families_that_cannot_express_a_network_say_what_does_not_fit(tmp_path):
    for family, lm, reason in (
        ("llada_moe", tiny.model("dlm"), "'llada_moe' is a mixture of experts, and this network is dense"),
        ("llada2_moe", tiny.model("sdar"), "'llada2_moe' is a mixture of experts, and this network is dense"),
        ("sdar", tiny.model("qwen3"), "'sdar' decodes block by block, and this model has no block_length"),
        ("llada", tiny.model("dlm-moe"), "'llada' cannot say .*moe = "),
        ("llama", tiny.model("dlm-learned"), "'llama' cannot say .*position_embedding = 'learned'"),
        ("Dream", tiny.model("Dream", rotary_dim=2), "'Dream' cannot say rotary_dim = 2"),
    ):
        refused(reason, dlm.save, lm, tmp_path / "m", family)
        dlm.save(lm, tmp_path / family, "dlm")  # which expresses everything
        ids = tiny.tokens()
        with torch.no_grad():
            found = load(tmp_path / family, device="cpu").network(ids)
            torch.testing.assert_close(found, lm.network(ids), rtol=1e-5, atol=1e-5)
    assert not (tmp_path / "m").exists()


def test_a_block_model_becomes_a_published_family_and_back(tmp_path):
    lm = convert(tiny.model("qwen3", mask_token_id=None), "block_causal", 4)
    refused("'sdar' cannot say shifted_logits = True", dlm.save, lm, tmp_path / "sdar", "sdar")
    lm = tiny.model("dlm", attention="block_causal", block_length=4)
    dlm.save(lm, tmp_path / "sdar", "sdar")
    hub = json.loads((tmp_path / "sdar" / "config.json").read_text())
    assert (hub["model_type"], hub["block_size"], hub["architectures"]) == ("sdar", 4, ["SDARForCausalLM"])
    with torch.no_grad():
        ids = tiny.tokens()
        found = load(tmp_path / "sdar", device="cpu").network(ids)
        torch.testing.assert_close(found, lm.network(ids), rtol=1e-5, atol=1e-5)


def test_weights_that_are_not_whole_are_refused(tmp_path):
    lm = tiny.model("dlm")
    lm.network.norm.weight = torch.nn.Parameter(torch.zeros(16, dtype=torch.uint8), requires_grad=False)
    refused("'dlm' is quantised", dlm.save, lm, tmp_path / "m")
    lm = tiny.model("dlm")
    lm.network.group = object()  # type: ignore[assignment]
    refused("split over processes: load it with tensor_parallel=1", dlm.save, lm, tmp_path / "m")
    lm = tiny.model("dlm")
    lm.network.peft_config = {}  # type: ignore[assignment]
    refused("adapters that are not merged; load it with merge=True", dlm.save, lm, tmp_path / "m", "dlm")
    assert not (tmp_path / "m").exists()


def test_other_peoples_files_are_not_written_over(tmp_path):
    lm, folder = tiny.model("dlm"), tmp_path / "mine"
    folder.mkdir()
    (folder / "config.json").write_text('{"name": "a web page"}')
    (folder / "page.html").write_text("")
    refused(r"mine holds 'config.json' and is no checkpoint: give a new folder, or overwrite", dlm.save, lm, folder)
    assert names(folder) == {"config.json", "page.html"}
    dlm.save(lm, folder, overwrite=True)
    assert load(folder, device="cpu").config == lm.config
    assert names(folder) == PLAIN | set(portable.CODE) | {"page.html"}
    dlm.save(lm, folder)  # a checkpoint may be replaced


def test_new_folders_may_hold_what_a_repository_starts_with(tmp_path):
    (tmp_path / "m" / ".git").mkdir(parents=True)
    (tmp_path / "m" / "README.md").write_text("# m")
    dlm.save(tiny.model("dlm"), tmp_path / "m")
    assert (tmp_path / "m" / "README.md").read_text() == "# m"


def test_everything_is_on_the_disk_before_it_takes_its_place(tmp_path, monkeypatch):
    lm, order, fsync, replace = tiny.model("dlm"), [], os.fsync, os.replace

    def syncing(file: int) -> None:
        order.append(("sync", Path(os.readlink(f"/proc/self/fd/{file}")).name))
        fsync(file)

    def moving(source: Path, target: Path) -> None:
        order.append(("move", Path(target).name))
        replace(source, target)

    dlm.save(lm, tmp_path / "m")
    monkeypatch.setattr(os, "fsync", syncing)
    monkeypatch.setattr(os, "replace", moving)
    dlm.save(lm, tmp_path / "m")
    moved = [name for deed, name in order if deed == "move"]
    assert set(moved) == PLAIN | set(portable.CODE) and moved[-1] == "config.json"
    assert all(order.index(("sync", name)) < order.index(("move", name)) for name in moved)
    assert all(path.stat().st_mode & 0o777 == 0o644 for path in (tmp_path / "m").iterdir())


def test_folders_that_cannot_be_written(tmp_path, monkeypatch):
    monkeypatch.setattr(atomic.tempfile, "mkdtemp", failing(errno.EACCES))
    refused(r"m cannot be written \(Permission denied\)", dlm.save, tiny.model("dlm"), tmp_path / "m")


@pytest.mark.parametrize("code", [True, False])  # whose files are written first; without them the weights fail
def test_a_full_disk_leaves_what_was_there(code, tmp_path):
    lm, ids = tiny.model("dlm"), tiny.tokens()
    dlm.save(lm, tmp_path / "m")
    wide = tiny.model("dlm", hidden_size=64)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8_000, before[1]))  # as a disk that is full: a write fails half-way
    try:
        with pytest.raises(UserError, match=r"m cannot be written \(.*File too large.*\): give a folder .* room"):
            dlm.save(wide, tmp_path / "m", code=code)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert names(tmp_path / "m") == PLAIN | set(portable.CODE)
    with torch.no_grad():
        torch.testing.assert_close(load(tmp_path / "m", device="cpu").network(ids), lm.network(ids))
