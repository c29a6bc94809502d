"""Batches and sources: the same for any number of processes, and stopped after any sample or batch they go on as if not stopped."""

import json
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from dlm.data.config import DataConfig
from dlm.data.loader import BatchLoader, SampleStream
from dlm.data.preparing import prepare
from dlm.data.source import build_stream
from dlm.data.tokenizer import Tokenizer
from dlm.errors import UserError
from tests.refusals import refused

from .conftest import PAIRS, assert_same, take

LENGTH = 10


@pytest.fixture(params=["map", "stream"])
def config(request: pytest.FixtureRequest, tmp_path: Path) -> DataConfig:
    rows = ({"p": f"ask {i}", "r": f"say {i} " * (i % 4)} for i in range(11))
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    streamed = {"dataset": "json", "streaming": True, "shuffle_buffer": 4} if request.param == "stream" else {}
    return DataConfig(paths=(str(tmp_path / "a.jsonl"),), **PAIRS, **streamed)


def stream_of(config: DataConfig, tokenizer: Tokenizer, epochs: int | None = None) -> SampleStream:
    return build_stream(config, tokenizer, 40, seed=1, epochs=epochs)


def equal(left: dict[str, Any], right: dict[str, Any]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[k], right[k]) for k in left)


def test_any_world_size_sees_the_same_batches(config, tokenizer):
    single = take(BatchLoader(stream_of(config, tokenizer), 8), 4)
    assert (single[0]["input_ids"].dtype, single[0]["prompt_mask"].dtype) == (torch.int64, torch.bool)
    assert torch.cat([b["index"] for b in single]).tolist() == list(range(32))
    states = set()
    for world_size in (2, 4):
        loaders = [BatchLoader(stream_of(config, tokenizer), 8, rank, world_size) for rank in range(world_size)]
        for expected in single:
            parts = [next(loader) for loader in loaders]
            assert equal({k: torch.cat([p[k] for p in parts]) for k in expected}, expected)
        states |= {json.dumps(loader.state_dict()) for loader in loaders}
    assert len(states) == 1


@pytest.mark.parametrize("prefetch", [0, 1, 3])
def test_resuming_after_every_batch(config, tokenizer, prefetch):
    loader = BatchLoader(stream_of(config, tokenizer), 3, prefetch=prefetch)
    states, batches = [json.dumps(loader.state_dict())], []
    for _ in range(9):
        batches.append(next(loader))
        states.append(json.dumps(loader.state_dict()))
    loader.close()
    assert json.dumps(loader.stream.state_dict()) == states[-1]
    plain = BatchLoader(stream_of(config, tokenizer), 3)
    assert [json.dumps(plain.state_dict()), *(json.dumps(plain.state_dict()) for _ in take(plain, 0))] == states[:1]
    other = BatchLoader(stream_of(config, tokenizer), 3, prefetch=prefetch)
    for k in (5, 0, 8, 3, 1, 7, 2, 6, 4):
        other.load_state_dict(json.loads(states[k]))
        assert all(equal(a, b) for a, b in zip(take(other, 9 - k), batches[k:], strict=True))
    other.close()
    # The position counts samples, so another batch size goes on at the same place.
    wider = BatchLoader(stream_of(config, tokenizer), 6)
    wider.load_state_dict(json.loads(states[3]))
    assert equal(next(wider), {k: torch.cat([batches[3][k], batches[4][k]]) for k in batches[3]})
    assert not [t for t in threading.enumerate() if t.name.startswith("dlm-prefetch")]


@pytest.mark.parametrize("prefetch", [0, 2])
def test_finite_streams_end(config, tokenizer, prefetch):
    def sizes(**options: Any) -> list[int]:
        loader = BatchLoader(stream_of(config, tokenizer, epochs=1), 4, prefetch=prefetch, **options)
        found = [len(b["index"]) for b in loader]
        assert next(loader, None) is None
        loader.close()
        return found

    assert sizes() == [4, 4]
    assert sizes(keep_partial=True) == [4, 4, 3]


def test_errors_of_the_thread_reach_the_caller():
    class Broken:
        def __iter__(self) -> "Broken":
            return self

        def __next__(self) -> Any:
            raise UserError("row 7 is broken")

        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state: dict[str, Any]) -> None: ...

    loader = BatchLoader(Broken(), 2, prefetch=2)
    for _ in range(2):
        refused("row 7", next, loader)
    loader.close()


HANGS = """
import signal, sys, threading
import numpy
from dlm.data.loader import BatchLoader

signal.signal(signal.SIGINT, signal.default_int_handler)  # a runner in the background ignores it
hanging = threading.Event()

class Stream:
    count = 0
    def __iter__(self): return self
    def __next__(self):
        self.count += 1
        if self.count > 2:
            print("hangs", flush=True)
            hanging.set()
            threading.Event().wait()
        return {"input_ids": numpy.zeros(4), "index": self.count}
    def state_dict(self): return {}
    def load_state_dict(self, state): ...

with BatchLoader(Stream(), 1, prefetch=2) as loader:
    next(loader), next(loader), hanging.wait()
    if sys.argv[1] == "interrupt":
        next(loader)
    raise ValueError("the step failed")
"""


@pytest.mark.parametrize(("how", "said"), [("error", "the step failed"), ("interrupt", "KeyboardInterrupt")])
def test_a_read_that_hangs_keeps_no_program_from_its_end(how, said):
    command = [sys.executable, "-c", HANGS, how]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "hangs\n"
        if how == "interrupt":
            process.send_signal(signal.SIGINT)
        try:
            assert said in process.communicate(timeout=120)[1]
        finally:
            process.kill()


def test_impossible_splits_of_a_batch_are_refused(tokenizer):
    class Empty:
        def state_dict(self) -> dict[str, Any]:
            return {}

    refused("batch_size = 3 does not divide among 2", BatchLoader, Empty(), 3, 0, 2)
    refused("rank = 2", BatchLoader, Empty(), 4, 2, 2)
    refused("keep_partial", BatchLoader, Empty(), 4, 0, 2, keep_partial=True)


ROWS = [{"text": f"row {i} " + "abc " * (i % 5)} for i in range(14)]
SIZE = 12
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
    config = DataConfig(source="jsonl", paths=rows, heldout_fraction=0)
    prepare(config, tokenizer, folder / "out", SIZE, shard_samples=7)
    return str(folder / "out")


SOURCES = ["text", "rows", "chat", "map", "stream", "stream rows", "stream in order", "stream chat", "sudoku", "tokens"]


@pytest.mark.parametrize("source", SOURCES)
def test_resuming_after_every_sample(source, tmp_path, tokenizer):
    config = config_of(source, tmp_path, tokenizer)
    length = 81 if source == "sudoku" else 64 if "chat" in source else SIZE
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
    table = build_stream(config_of("text", tmp_path, tokenizer), tokenizer, SIZE)
    streamed = build_stream(config_of("stream", tmp_path, tokenizer), tokenizer, SIZE)
    refused("not of this data", table.load_state_dict, streamed.state_dict())
    refused("data is 'table', not a streamed", streamed.load_state_dict, table.state_dict())
    longer = build_stream(config_of("text", tmp_path, tokenizer), tokenizer, 2 * SIZE)
    refused(r"same .*length", longer.load_state_dict, table.state_dict())
