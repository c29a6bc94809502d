"""benchmarks/kernels.py at its smallest."""

import json

import pytest


@pytest.fixture
def benchmark(script):
    return script("kernels")


def test_it_runs_on_a_cpu_and_prints_the_rooflines(benchmark, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(benchmark.CACHED, "cpu", 1)
    file = tmp_path / "kernels.json"
    words = ["--device", "cpu", "--only", "batch 1,", "--seconds", "0.001", "--output", str(file)]
    assert benchmark.main(words) == 0
    report = json.loads(file.read_text("utf-8"))
    assert report["scale"] == "tiny" and report["machine"]["commit"] and report["machine"]["torch"]
    (result,) = report["results"]
    assert result["forward_error"] < 1e-5 and result["bytes"] > 0 and result["reached"] > 0
    capsys.readouterr()
    benchmark.print_rooflines(benchmark.CASES)
    lines = [line for line in capsys.readouterr().out.splitlines() if "batch 64, context 4,096, block 32" in line]
    assert len(lines) == 1 and "4,328.5" in lines[0] and lines[0].endswith("80%")


def test_bytes_and_flops_of_a_block_step(script):
    cases = script("cases")
    case = cases.Attention(batch=2, context=64, block=4, heads=8, kv_heads=2, head_dim=16)
    assert case.work(2) == (2 * (2 * 64 * 2 * 16 + 2 * 4 * 8 * 16) * 2, 2 * 4 * 4 * 64 * 8 * 16)
    causal = cases.Attention(batch=1, context=3, block=3, heads=1, kv_heads=1, head_dim=16, block_length=1)
    assert causal.work(4)[1] == 4 * (1 + 2 + 3) * 16


def test_an_unknown_case_lists_the_known_ones(benchmark, capsys):
    assert benchmark.main(["--only", "nothing"]) == 2
    assert "norm, 2,048 rows of 4,096" in capsys.readouterr().err
