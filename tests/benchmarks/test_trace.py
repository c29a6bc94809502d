"""benchmarks/trace.py: its figures are of what they say, and DiffTrace's are taken by the calls its examples make."""

import json
import sys

import numpy as np
import pytest

from dlm.errors import UserError
from dlm.trace import from_map
from tests.inference.tiny import text_lm

SMALL = "--traces 220 --writes 30 --tokenizer pico --requests 3 --gen-length 4 --seconds 0.01"
PEER = {
    "__init__": "",
    "engine": """
class DiffTraceEngine:
    def __init__(self, config):
        self.kept, self.folder = {}, config.store.base_path
        self.folder.mkdir()
        self.replay_engine = self.compressor = self
    def compress_trajectory(self, trajectory):
        return trajectory
    token_replay = lambda self, trajectory: trajectory
    def store_trajectory(self, trajectory):
        assert sum(step.num_unmasked for step in trajectory.steps) == trajectory.sequence_length
        assert not trajectory.steps[-1].mask_state.any()
        self.kept[trajectory.request_id] = trajectory
        (self.folder / trajectory.request_id).write_bytes(bytes(5000))
    def replay(self, name):
        return self.kept[name]
    flush = shutdown = lambda self: None
""",
    "utils/__init__": "",
    "utils/config": """
from types import SimpleNamespace
DiffTraceConfig = lambda: SimpleNamespace(store=SimpleNamespace(base_path=None))
""",
    "core/__init__": "",
    "core/trajectory": "from types import SimpleNamespace as DenoiseStep, SimpleNamespace as TrajectoryRecord",
}


@pytest.fixture
def peer(tmp_path):
    for name, content in PEER.items():
        file = tmp_path / "difftrace" / f"{name}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content)
    yield tmp_path
    for name in [name for name in sys.modules if name.split(".")[0] == "difftrace"]:
        del sys.modules[name]


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_everything_is_measured(script, monkeypatch, peer, tmp_path, capsys):
    trace = script("trace")
    start = [{"what": "dlm-replay", "seconds": 0.1, "cpu_seconds": 0.1}]
    monkeypatch.setattr("traces.records.start", lambda: start)
    monkeypatch.setattr("dlm.load", lambda name: text_lm())
    file = tmp_path / "trace.json"
    assert trace.main([*SMALL.split(), "--peer-path", str(peer), "--output", str(file)]) == 0
    found = json.loads(file.read_text())["trace"]
    assert {"bytes", "microseconds", "start", "writes", "overhead", "difftrace"} < found.keys()
    bound, _, stored, learnt, _ = found["bytes"]
    assert bound["record"] == pytest.approx(335.45, abs=0.01)
    assert learnt["record"] < stored["record"] < stored["file"] < 1000
    assert all(row["microseconds"] > 0 for row in found["microseconds"])
    assert [(row["durability"], row["processes"]) for row in found["writes"]][:2] == [("trace", 1), ("trace", 3)]
    steps, _, notes, *_, whole = found["overhead"]
    assert steps["pairs"] == notes["pairs"] == 3 * 4
    assert notes["more"] > 0 and whole["off"] > 0
    assert found["difftrace"][-1]["theirs"] == 5000
    printed = capsys.readouterr().out
    assert "## Traces: recording" in printed and "## Traces: DiffTrace" in printed


def test_the_dictionary_learns_from_other_files(script):
    from traces import samples

    stored, lessons = samples.samples(220, "pico")
    assert (len(stored), len(lessons)) == (220, 110)
    shared = {trace.first_token.tobytes() for trace in stored} & {trace.first_token.tobytes() for trace in lessons}
    assert not shared
    assert {len(trace.request_id) for trace in stored} == {8}
    assert all(np.bincount(trace.first_step).tolist() == [2] * 64 for trace in stored[:5])


def test_medians_and_their_interval(script):
    from traces import overhead

    off = np.full(101, 1000)
    row = overhead._compared(off.tolist(), (off + np.arange(101) - 40).tolist())
    assert row["off"] == 1.0 and row["more"] == pytest.approx(0.010) and row["percent"] == pytest.approx(1.0)
    assert row["low"] == pytest.approx(0.0, abs=0.11) and row["high"] == pytest.approx(2.0, abs=0.11)


def test_a_folder_without_difftrace_is_named(script, tmp_path):
    from traces import difftrace

    with pytest.raises(UserError, match=r"--peer-path .*none: no checkout of DiffTrace"):
        difftrace.measure(tmp_path / "none", 0.01, [from_map("x", [1], [0], None)])
