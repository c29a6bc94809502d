"""The same traces through DiffTrace's own code, from a checkout of it, by the calls that its examples make."""

import importlib
import logging
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from traces.records import least

from dlm.errors import UserError
from dlm.trace.codec import decode, encode
from dlm.trace.facts import Facts, facts
from dlm.trace.store import TraceStore
from dlm.trace.trace import Trace

COMPARED = 1000  # this many traces only: its files are ten times as large
TEXT = (
    f"{COMPARED:,} traces at most through both in one process; DiffTrace with tokens and masks, its defaults but for random states, which "
    "are left out. It replays final tokens only, and has no check of what it reads."
)


def measure(checkout: Path, seconds: float, traces: list[Trace]) -> list[dict[str, Any]]:
    peer, traces = _Peer(checkout), traces[:COMPARED]
    with tempfile.TemporaryDirectory() as folder:
        path, other = Path(folder) / "traces.db", Path(folder) / "difftrace"
        with TraceStore(path, "none", False) as store:
            for trace in traces:
                store.put(trace)
        engine = peer.engine(other)
        for trace in traces:
            engine.store_trajectory(peer.trajectory(trace))
        engine.flush()
        one, name = traces[0], traces[0].request_id
        record, context = encode(one), Facts(facts(one.context))
        compress = engine.compressor.compress_trajectory
        compressed = compress(peer.trajectory(one))
        assert (engine.replay(name).generated_tokens == one.tokens).all()
        with TraceStore(path) as store:
            calls: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
                "from memory, final tokens, µs": (
                    lambda: decode(record, name, context).tokens,
                    lambda: engine.replay_engine.token_replay(compressed),
                ),
                "from the disk, final tokens, µs": (lambda: store[name].tokens, lambda: engine.replay(name)),
                "compress one, µs": (lambda: encode(one), lambda: compress(peer.trajectory(one))),
            }
            rows = [
                {"what": what, "ours": least(ours, seconds), "theirs": least(theirs, seconds)}
                for what, (ours, theirs) in calls.items()
            ]
        used = sum(file.stat().st_size for file in other.rglob("*") if file.is_file())
        rows.append({"what": "bytes a trace", "ours": path.stat().st_size / len(traces), "theirs": used / len(traces)})
        engine.shutdown()
    return [{**row, "ratio": row["theirs"] / row["ours"]} for row in rows]


class _Peer:
    """DiffTrace's modules, imported from the checkout at `path`."""

    def __init__(self, path: Path) -> None:
        if not (path / "difftrace" / "engine.py").is_file():
            raise UserError(f"--peer-path {path}: no checkout of DiffTrace: there is no difftrace/engine.py in it")
        logging.getLogger("difftrace").setLevel(logging.WARNING)
        sys.path.insert(0, str(path.resolve()))
        try:
            self.engines, self.config, self.trajectories = (
                importlib.import_module(f"difftrace.{name}") for name in ("engine", "utils.config", "core.trajectory")
            )
        finally:
            sys.path.pop(0)

    def engine(self, folder: Path) -> Any:
        config = self.config.DiffTraceConfig()
        config.store.base_path = folder
        return self.engines.DiffTraceEngine(config)

    def trajectory(self, trace: Trace) -> Any:
        """The record that DiffTrace's capture makes of the same trace."""
        masked = np.stack([trace.first_step >= k for k in range(1, trace.num_steps + 1)])
        steps = []
        for k in range(trace.num_steps):
            where = np.flatnonzero(trace.first_step == k).astype(np.int32)
            step = {"step_index": k, "unmasked_positions": where, "sampled_tokens": trace.first_token[where]}
            steps.append(self.trajectories.DenoiseStep(**step, mask_state=masked[k], num_unmasked=len(where)))
        return self.trajectories.TrajectoryRecord(
            request_id=trace.request_id,
            prompt_tokens=np.zeros(0, np.int32),
            generated_tokens=trace.tokens,
            model_name=trace.meta["model"],
            num_diffusion_steps=trace.num_steps,
            sequence_length=trace.length,
            steps=steps,
        )
