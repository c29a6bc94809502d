"""benchmarks/engine.py and kernels.py at their smallest: that their parts run, and that their figures fit together."""

import json

import pytest
import torch


@pytest.fixture
def engine(script, monkeypatch):
    module = script("engine")
    tiny = {"hidden_size": 8, "num_hidden_layers": 1, "heads": 2, "intermediate_size": 8, "vocab_size": 32}
    monkeypatch.setitem(module.SHAPES, "tiny", tiny)
    threads = torch.get_num_threads()
    yield module
    torch.set_num_threads(threads)


def run(engine, tmp_path, words: str) -> dict:
    file = tmp_path / "e.json"
    sizes = "--prompt 8 --gen 4 --block 2 --steps 4 --rounds 2"
    assert engine.main([*sizes.split(), *words.split(), "--output", str(file)]) == 0
    text = file.read_text("utf-8")
    assert str(tmp_path) not in text  # results are published, paths are not
    return json.loads(text)


def test_caches(engine, tmp_path):
    report = run(engine, tmp_path, "--caches none dual --vocab 40")
    rows = report["caches"]["rows"]
    kinds = ("ours", "deterministic", "modules")
    assert rows.keys() == {"bare dual", *(f"{kind} {cache}" for kind in kinds for cache in ("none", "dual"))}
    assert rows["deterministic dual"]["of_ours"]["median"] > 0
    assert report["caches"]["attention_ms_of_a_block_forward"] > 0
    assert all(row["nfe"] == 4 and 0 < row["seconds"] <= row["median"] for row in rows.values())
    assert report["options"]["vocab"] == 40 and report["caches"]["floor_ms_of_a_block_forward"] > 0


def test_batch(engine, tmp_path):
    found = run(engine, tmp_path, "--batch")["batch"]
    assert found["same_tokens"] and found["tokens"] == 8 * 4
    for clock in ("wall", "cpu"):
        by = found[clock]
        assert by["gain"]["low"] <= by["gain"]["median"] <= by["gain"]["high"]
        assert by["seconds"].keys() == {"together", "one by one", "products together", "products one by one"}


def test_roofline(engine, tmp_path):
    found = run(engine, tmp_path, "--roofline --context 16")["roofline"]
    assert found["ms_its_bytes_need"] == pytest.approx(1e3 * found["bytes"] / (1e9 * found["copy_bandwidth_gb_s"]))
    assert found["times_the_roofline"] > 0


def test_ratios_are_taken_within_rounds(engine):
    found = engine._ratio([1.0, 4.0, 9.0], [1.0, 2.0, 3.0])
    assert found == {"median": 2.0, "low": 1.0, "high": 3.0, "of_the_best": 1.0}


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
