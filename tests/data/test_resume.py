"""Every source, stopped after any sample, goes on as if it had not been stopped."""

import json
from pathlib import Path

import pytest

from dlm.data.config import DataConfig
from dlm.data.preparing import prepare
from dlm.data.source import build_stream
from dlm.data.tokenizer import Tokenizer
from tests.refusals import refused

from .conftest import assert_same, take

ROWS = [{"text": f"row {i} " + "abc " * (i % 5)} for i in range(14)]
LENGTH = 12
AHEAD = 6


def config_of(source: str, folder: Path, tokenizer: Tokenizer) -> DataConfig:
    for number, part in enumerate((ROWS[:8], ROWS[8:])):
        (folder / f"{number}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    chats = [{"prompt": row["text"], "response": f"answer {i}"} for i, row in enumerate(ROWS)]
    (folder / "chats.json").write_text("".join(json.dumps(row) + "\n" for row in chats))
    rows, pair = (str(folder / "*.jsonl"),), {"prompt_field": "prompt", "response_field": "response"}
    streamed = {"dataset": "json", "streaming": True}
    configs = {
        "text": lambda: DataConfig(source="text", paths=rows, document="line"),
        "rows": lambda: DataConfig(source="jsonl", paths=rows, pack="row"),
        "chat": lambda: DataConfig(source="chat", paths=(str(folder / "chats.json"),), pack="row", **pair),
        "map": lambda: DataConfig(source="datasets", dataset="json", paths=rows),
        "stream": lambda: DataConfig(source="datasets", paths=rows, shuffle_buffer=5, **streamed),
        "stream rows": lambda: DataConfig(source="datasets", paths=rows, shuffle_buffer=100, pack="row", **streamed),
        "stream in order": lambda: DataConfig(source="datasets", paths=rows, shuffle_buffer=1, **streamed),
        "stream chat": lambda: DataConfig(
            source="chat", paths=(str(folder / "chats.json"),), pack="row", shuffle_buffer=4, **pair, **streamed
        ),
        "sudoku": lambda: DataConfig(source="sudoku", sudoku_pool=2, sudoku_empty=(20, 40)),
        "tokens": lambda: DataConfig(source="tokens", paths=(_prepared(folder, rows, tokenizer),)),
    }
    return configs[source]()


def _prepared(folder: Path, rows: tuple[str, ...], tokenizer: Tokenizer) -> str:
    prepare(
        DataConfig(source="jsonl", paths=rows, heldout_fraction=0), tokenizer, folder / "out", LENGTH, shard_samples=7
    )
    return str(folder / "out")


SOURCES = ["text", "rows", "chat", "map", "stream", "stream rows", "stream in order", "stream chat", "sudoku", "tokens"]


@pytest.mark.parametrize("source", SOURCES)
def test_resuming_after_every_sample(source, tmp_path, tokenizer):
    config = config_of(source, tmp_path, tokenizer)
    length = 81 if source == "sudoku" else 64 if "chat" in source else LENGTH
    stream = build_stream(config, tokenizer, length, seed=3)
    states, samples = [], []
    for _ in range(40):
        states.append(json.dumps(stream.state_dict()))
        samples.append(next(stream))
    samples += take(stream, AHEAD)
    assert [s["index"] for s in samples] == list(range(len(samples)))
    other = build_stream(config, tokenizer, length, seed=3)
    # One stream is thrown back and forth, which also shows that loading leaves nothing of the old position behind.
    for k in sorted(range(40), key=lambda k: k * 17 % 40):
        other.load_state_dict(json.loads(states[k]))
        assert json.dumps(other.state_dict()) == states[k]
        assert_same(take(other, AHEAD), samples[k : k + AHEAD])
    fresh = build_stream(config, tokenizer, length, seed=3)
    fresh.load_state_dict(json.loads(states[17]))
    assert_same(take(fresh, len(samples) - 17), samples[17:])


def test_a_position_in_other_data_is_refused(tmp_path, tokenizer):
    table = build_stream(config_of("text", tmp_path, tokenizer), tokenizer, LENGTH)
    streamed = build_stream(config_of("stream", tmp_path, tokenizer), tokenizer, LENGTH)
    refused("not of this data", table.load_state_dict, streamed.state_dict())
    refused("kind 'table'", streamed.load_state_dict, table.state_dict())
    longer = build_stream(config_of("text", tmp_path, tokenizer), tokenizer, 2 * LENGTH)
    refused(r"same .*length", longer.load_state_dict, table.state_dict())
