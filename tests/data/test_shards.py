import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from dlm.data import preparing
from dlm.data.config import DataConfig
from dlm.data.preparing import prepare
from dlm.data.source import build_stream
from dlm.errors import UserError
from tests.refusals import refused

from .conftest import PAIRS


@pytest.fixture
def data(texts: Path) -> DataConfig:
    return DataConfig(source="text", paths=(str(texts),), document="line", heldout_fraction=0.2)


def ids_of(stream: object) -> list[list[int]]:
    return [s["input_ids"].tolist() for s in stream]


@pytest.mark.parametrize("split", ["train", "heldout"])
def test_shards_hold_one_pass_of_the_source(data, tokenizer, tmp_path, split):
    manifest = prepare(data, tokenizer, tmp_path / "out", 16, seed=5, shard_samples=10)
    expected = ids_of(build_stream(data, tokenizer, 16, split, seed=5, epochs=1))
    files = [tmp_path / "out" / s["file"] for s in manifest["splits"][split]]
    assert [row for f in files for row in pq.read_table(f)["input_ids"].to_pylist()] == expected
    tokens = DataConfig(source="tokens", paths=(str(tmp_path / "out"),))
    read = ids_of(build_stream(tokens, tokenizer, 16, split, epochs=1))
    assert sorted(read) == sorted(expected)
    assert (manifest["tokenizer"], manifest["length"]) == (tokenizer.fingerprint, 16)


def test_conversations_keep_their_masks(tokenizer, tmp_path):
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"p": f"q{i}", "r": f"a{i}"}) + "\n" for i in range(9)))
    config = DataConfig(paths=(str(tmp_path / "a.jsonl"),), **PAIRS)
    prepare(config, tokenizer, tmp_path / "out", 32, shard_samples=4)
    read = build_stream(DataConfig(source="tokens", paths=(str(tmp_path / "out"),)), tokenizer, 32, epochs=1)
    straight = build_stream(config, tokenizer, 32, epochs=1)
    stored, made = ([(s["input_ids"].tolist(), s["prompt_mask"].tolist()) for s in side] for side in (read, straight))
    assert sorted(stored) == sorted(made)


def test_a_crash_costs_one_shard(data, tokenizer, tmp_path, monkeypatch):
    whole = prepare(data, tokenizer, tmp_path / "whole", 16, shard_samples=6)
    write, written = preparing._write_shard, []

    def crash_at_third(path: Path, *rest: object) -> None:
        written.append(path.name)
        if len(written) == 3:
            raise KeyboardInterrupt
        write(path, *rest)

    monkeypatch.setattr(preparing, "_write_shard", crash_at_third)
    with pytest.raises(KeyboardInterrupt):
        prepare(data, tokenizer, tmp_path / "out", 16, shard_samples=6)
    half = DataConfig(source="tokens", paths=(str(tmp_path / "out"),))
    refused("not finished; run it again", build_stream, half, tokenizer, 16)
    refused("unfinished shards", prepare, data, tokenizer, tmp_path / "out", 8, shard_samples=6)
    assert prepare(data, tokenizer, tmp_path / "out", 16, shard_samples=6) == whole
    assert written[2:] == ["00002.parquet", *written[3:]]
    for entry in whole["splits"]["train"]:
        assert pq.read_table(tmp_path / "out" / entry["file"]).equals(pq.read_table(tmp_path / "whole" / entry["file"]))
    count = len(written)
    assert prepare(data, tokenizer, tmp_path / "out", 16, shard_samples=6) == whole
    assert len(written) == count
    assert not list((tmp_path / "out").rglob("progress.json"))


def test_what_does_not_match_is_said(data, tokenizer, tmp_path):
    out = tmp_path / "out"
    prepare(data, tokenizer, out, 16, max_samples=3)
    tokens = DataConfig(source="tokens", paths=(str(out),))
    assert len(ids_of(build_stream(tokens, tokenizer, 16, epochs=1))) == 3
    refused("length 16, not 8: prepare it again", build_stream, tokens, tokenizer, 8)
    refused("another tokenizer, length", prepare, data, tokenizer, out, 8)
    refused("no text to tokenise", prepare, tokens, tokenizer, tmp_path / "again", 16)
    with pytest.raises(UserError, match=r"no manifest\.json: write it with"):
        build_stream(DataConfig(source="tokens", paths=(str(tmp_path),)), tokenizer, 16)
    uncached = tokens.model_copy(update={"cache": False})
    (out / "train" / "00000.parquet").write_bytes(b"torn")
    refused(r"00000\.parquet cannot be read", build_stream, uncached, tokenizer, 16)
    (out / "manifest.json").write_text("{")
    refused(r"manifest\.json is not valid JSON", build_stream, tokens, tokenizer, 16)


def test_a_folder_that_cannot_be_written_to_is_refused_before_the_work(data, tokenizer, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setattr(preparing, "_write_split", None)
    with pytest.raises(UserError, match=r"--prepare .*/file/out: cannot be written to \(Not a directory\): choose"):
        prepare(data, tokenizer, tmp_path / "file" / "out", 16)
    refused(r"--prepare .*/file is a file: give a folder", prepare, data, tokenizer, tmp_path / "file", 16)
    refused(r"--prepare /proc/nowhere: cannot be written to", prepare, data, tokenizer, "/proc/nowhere", 16)
