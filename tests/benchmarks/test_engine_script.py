"""benchmarks/engine.py and kernels.py at their smallest: that their parts run, and that their figures fit together."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.inference.tiny import tiny_lm


@pytest.fixture
def engine(script, monkeypatch):
    module = script("engine")
    shapes = module.roofline.SHAPES
    monkeypatch.setitem(shapes, "tiny", {**shapes["tiny"], "sizes": (8, 1, 2, 2, 8, 32)})
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
    found = run(engine, tmp_path, "--roofline --context 16 --batch 1 2")["floors"]
    assert [step["batch"] for step in found] == [1, 2] and all(step["times_the_roofline"] > 0 for step in found)
    one, two = found
    assert (one["rows"], two["rows"]) == (2, 4)
    weights = 4 * 8 * 8 + 3 * 8 * 8 + 3 * 8 + 8 * 32  # projections, feed-forward, norms, head
    assert one["bytes"] == 4 * (weights + 2 * 16 * 8) and two["bytes"] == 4 * (weights + 2 * 2 * 16 * 8)
    assert one["flops"] == 2 * (2 * weights + 4 * 16 * 8)


def test_experts_count_as_often_as_rows_choose_them(engine):
    roofline = engine.roofline
    sizes = {"num_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 4}
    lm = tiny_lm(num_hidden_layers=1, moe=sizes)
    one, many = (roofline.work(lm, 1, 16, rows) for rows in (1, 10_000))
    experts = 8 * 3 * 4 * 32
    assert many[0] - one[0] == 4 * (experts - experts // 4)  # a row reads two of eight experts; many rows all
    assert {"llada-8b", "dream-7b", "sdar-4b", "llada2-mini"} <= roofline.SHAPES.keys()


FAKE = """#!/bin/bash
[ "$1" = -c ] && exit 0
[ "$1" = - ] && exec {python} "$@"
echo "$@" >> {folder}/calls
case "$*" in *dream-7b*) exit ${{BROKEN:-0}};; *sdar-4b*) echo '{{"report": 7}}' > {folder}/out/sdar-4b.json;; esac
"""


def test_the_first_hour_goes_on_where_it_was(tmp_path):
    fake = tmp_path / "python"
    fake.write_text(FAKE.format(python=sys.executable, folder=tmp_path))
    fake.chmod(0o755)
    script = Path(__file__).parents[2] / "benchmarks" / "gpu_first_hour.sh"

    def go(**more: str) -> tuple[int, list[str]]:
        (tmp_path / "calls").write_text("")
        environment = {**os.environ, "PYTHON": str(fake), **more}
        done = subprocess.run(["bash", script, tmp_path / "out"], env=environment, capture_output=True, text=True)
        return done.returncode, (tmp_path / "calls").read_text().splitlines()

    status, calls = go(BROKEN="3")
    assert status == 1 and len(calls) == 11
    read = {file.stem: json.loads(file.read_text()) for file in (tmp_path / "out").glob("*.json")}
    assert len(read) == 11 and read["dream-7b"]["status"] == 3 and read["sdar-4b"]["report"] == 7
    status, calls = go()
    assert status == 0 and len(calls) == 1 and "dream-7b" in calls[0]
    assert go() == (0, [])


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
