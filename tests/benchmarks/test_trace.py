"""benchmarks/trace.py: its figures are of what they say."""

import json

import numpy as np
import pytest

from tests.inference.tiny import text_lm

SMALL = "--traces 220 --writes 30 --tokenizer pico --requests 3 --gen-length 4 --seconds 0.01"


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_everything_is_measured(script, monkeypatch, tmp_path, capsys):
    trace = script("trace")
    start = [{"what": "dlm-replay", "seconds": 0.1, "cpu_seconds": 0.1}]
    monkeypatch.setattr("traces.records.start", lambda: start)
    monkeypatch.setattr("dlm.load", lambda name: text_lm())
    file = tmp_path / "trace.json"
    assert trace.main([*SMALL.split(), "--output", str(file)]) == 0
    found = json.loads(file.read_text())["trace"]
    assert {"bytes", "microseconds", "start", "writes", "overhead"} < found.keys()
    bound, _, stored, learnt, _ = found["bytes"]
    assert bound["record"] == pytest.approx(335.45, abs=0.01)
    assert learnt["record"] < stored["record"] < stored["file"] < 1000
    assert all(row["microseconds"] > 0 for row in found["microseconds"])
    assert [(row["durability"], row["processes"]) for row in found["writes"]][:2] == [("trace", 1), ("trace", 3)]
    steps, _, notes, *_, whole = found["overhead"]
    assert steps["pairs"] == notes["pairs"] == 3 * 4
    assert notes["more"] > 0 and whole["off"] > 0
    assert "## Traces: recording" in capsys.readouterr().out


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
