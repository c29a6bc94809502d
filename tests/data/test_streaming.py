import json
from collections import Counter
from pathlib import Path

import datasets
import pytest

from dlm.data.config import DataConfig
from dlm.data.source import build_stream
from dlm.data.streaming import ShuffleBuffer
from dlm.data.tokenizer import Tokenizer
from dlm.errors import UserError
from tests.refusals import refused


def numbers(n: int, shards: int = 1) -> datasets.IterableDataset:
    return datasets.Dataset.from_dict({"text": [str(i) for i in range(n)]}).to_iterable_dataset(num_shards=shards)


def epoch(buffer: ShuffleBuffer) -> list[str]:
    drawn = []
    while (row := buffer.next()) is not None:
        drawn.append(row[1]["text"])
    return drawn


@pytest.mark.parametrize("size", [1, 2, 7, 19, 20, 50])
def test_every_row_once_an_epoch(size):
    buffer = ShuffleBuffer(numbers(20, 4), size, seed=1)
    first, second = epoch(buffer), epoch(buffer)
    assert Counter(first) == Counter(second) == Counter(map(str, range(20)))
    assert (first == second == [str(i) for i in range(20)]) == (size == 1)
    again, other = ShuffleBuffer(numbers(20, 4), size, 1), ShuffleBuffer(numbers(20, 4), size, 2)
    assert epoch(again) == first
    assert (epoch(other) == first) == (size == 1)


def test_a_full_buffer_shuffles_evenly():
    places = Counter(epoch(ShuffleBuffer(numbers(4), 4, seed)).index("0") for seed in range(120))
    assert all(14 < places[place] < 50 for place in range(4))


def write(folder: Path, rows: list[dict], name: str = "a.jsonl") -> str:
    (folder / name).write_text("".join(json.dumps(r) + "\n" for r in rows))
    return str(folder / name)


def rows_in(config: DataConfig, tokenizer: Tokenizer, split: str) -> list[str]:
    return [tokenizer.decode(s["input_ids"].tolist()) for s in build_stream(config, tokenizer, 16, split, epochs=1)]


def test_the_hash_splits_streams_and_maps_alike(tmp_path, tokenizer):
    path = write(tmp_path, [{"text": f"r {i}", "other": i} for i in range(40)])
    held = []
    for streaming in (True, False):
        how = {"streaming": streaming, "pack": "row", "heldout_fraction": 0.3}
        config = DataConfig(source="datasets", dataset="json", paths=(path,), **how)
        held.append(rows_in(config, tokenizer, "heldout"))
        assert sorted(rows_in(config, tokenizer, "train") + held[-1]) == sorted(f"r {i}" for i in range(40))
    assert set(held[0]) == set(held[1])
    assert 4 < len(held[0]) < 20


def test_named_held_out_files_and_splits(tmp_path, tokenizer):
    train, held = write(tmp_path, [{"text": "t"}] * 3), write(tmp_path, [{"text": "h"}], "b.jsonl")
    config = DataConfig(
        source="datasets", dataset="json", paths=(train,), heldout_paths=(held,), streaming=True, pack="row"
    )
    assert (rows_in(config, tokenizer, "train"), rows_in(config, tokenizer, "heldout")) == (["t"] * 3, ["h"])
    saved = datasets.DatasetDict({s: datasets.Dataset.from_dict({"text": [s]}) for s in ("train", "test")})
    saved.save_to_disk(tmp_path / "saved")
    disk = DataConfig(source="datasets", dataset=str(tmp_path / "saved"), heldout_split="test", pack="row")
    assert rows_in(disk, tokenizer, "heldout") == ["test"]
    refused("it has the splits train, test", build_stream, disk.model_copy(update={"split": "dev"}), tokenizer, 16)


def test_parquet_and_text_builders(tmp_path, tokenizer):
    datasets.Dataset.from_dict({"text": ["p"]}).to_parquet(tmp_path / "a.parquet")
    (tmp_path / "a.txt").write_text("x\ny\n")
    for builder, expected in (("parquet", ["p"]), ("text", ["x", "y"])):
        how = {"streaming": True, "pack": "row", "heldout_fraction": 0, "shuffle_buffer": 1}
        config = DataConfig(source="datasets", dataset=builder, paths=(str(tmp_path),), **how)
        assert rows_in(config, tokenizer, "train") == expected


def test_what_is_missing_or_broken_is_said(tmp_path, tokenizer, monkeypatch):
    def build(**fields: object) -> None:
        config = DataConfig(**{"source": "datasets", "streaming": True, "heldout_fraction": 0, **fields})
        next(build_stream(config, tokenizer, 4))

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    refused(r"nobody/nothing.*not in the local cache", build, dataset="nobody/nothing")
    refused("no such folder", build, dataset="./nothing")
    refused("no such file", build, dataset="json", paths=(str(tmp_path / "x.jsonl"),))
    refused("json, text or parquet", build, dataset="csv", paths=("x.csv",))
    with pytest.raises(UserError, match="no column `body`; the dataset has text"):
        build(dataset="json", paths=(write(tmp_path, [{"text": "a"}]),), text_fields=("body",))
    refused("no text in its train split", build, dataset="json", paths=(write(tmp_path, [{"text": ""}]),))
    pair = {"source": "chat", "pack": "row", "prompt_field": "p", "response_field": "r"}
    with pytest.raises(UserError, match="no text with an answer in its first 4 tokens"):
        build(dataset="json", paths=(write(tmp_path, [{"p": "a long question", "r": "x"}]),), **pair)
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n{"text": \n')
    refused("cannot be read", build, dataset="json", paths=(str(tmp_path / "a.jsonl"),))
