"""Batches: the same for any number of processes, exact to resume however far a thread has read ahead."""

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from dlm.data.config import DataConfig
from dlm.data.loader import BatchLoader, SampleStream
from dlm.data.source import build_stream
from dlm.data.tokenizer import Tokenizer
from dlm.errors import UserError

from .conftest import take

LENGTH = 10


@pytest.fixture(params=["map", "stream"])
def config(request: pytest.FixtureRequest, tmp_path: Path) -> DataConfig:
    (tmp_path / "a.jsonl").write_text(
        "".join(json.dumps({"p": f"ask {i}", "r": f"say {i} " * (i % 4)}) + "\n" for i in range(11))
    )
    streamed = {"dataset": "json", "streaming": True, "shuffle_buffer": 4} if request.param == "stream" else {}
    return DataConfig(
        source="chat",
        paths=(str(tmp_path / "a.jsonl"),),
        prompt_field="p",
        response_field="r",
        pack="row",
        heldout_fraction=0,
        **streamed,
    )


def stream_of(config: DataConfig, tokenizer: Tokenizer, epochs: int | None = None) -> SampleStream:
    return build_stream(config, tokenizer, 40, seed=1, epochs=epochs)


def equal(left: dict[str, Any], right: dict[str, Any]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[k], right[k]) for k in left)


def test_any_world_size_sees_the_same_batches(config: DataConfig, tokenizer: Tokenizer) -> None:
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
def test_resuming_after_every_batch(config: DataConfig, tokenizer: Tokenizer, prefetch: int) -> None:
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
def test_finite_streams_end(config: DataConfig, tokenizer: Tokenizer, prefetch: int) -> None:
    def sizes(**options: Any) -> list[int]:
        loader = BatchLoader(stream_of(config, tokenizer, epochs=1), 4, prefetch=prefetch, **options)
        found = [len(b["index"]) for b in loader]
        assert next(loader, None) is None
        loader.close()
        return found

    assert sizes() == [4, 4]
    assert sizes(keep_partial=True) == [4, 4, 3]


def test_errors_of_the_thread_reach_the_caller() -> None:
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
        with pytest.raises(UserError, match="row 7"):
            next(loader)
    loader.close()


def test_impossible_splits_of_a_batch_are_refused(tokenizer: Tokenizer) -> None:
    class Empty:
        def state_dict(self) -> dict[str, Any]:
            return {}

    with pytest.raises(UserError, match="batch_size = 3 does not divide among 2"):
        BatchLoader(Empty(), 3, 0, 2)
    with pytest.raises(UserError, match="rank = 2"):
        BatchLoader(Empty(), 4, 2, 2)
    with pytest.raises(UserError, match="keep_partial"):
        BatchLoader(Empty(), 4, 0, 2, keep_partial=True)
