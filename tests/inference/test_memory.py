"""The memory plan of an engine against what its tensors take, how pages are sized by it, and what is said where it does not fit."""

import json

import pytest
import torch

import dlm
from dlm.cli.config import JobConfig, OutputConfig
from dlm.cli.decode import decode
from dlm.cli.show import Printer
from dlm.inference import memory
from dlm.inference.config import EngineConfig, SamplerConfig
from dlm.serving.config import ServeConfig
from dlm.serving.server import Server
from tests.refusals import refused

from .fake_gpu import fake_gpu
from .live_bytes import peak_of
from .requests import FAMILIES
from .tiny import text_lm, tiny_lm

WIDE = {"hidden_size": 64, "intermediate_size": 160, "head_dim": 16}
MOE = {"num_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 96}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "shape", [WIDE, {**WIDE, "vocab_size": 4000}, FAMILIES["sdar"] | WIDE], ids=["wide", "words", "sdar"]
)
def test_a_step_keeps_within_its_plan(shape, dtype):
    lm = tiny_lm(**shape).to(dtype)
    settings = {"gen_length": 32, "block_length": 32} if "attention" not in shape else {"gen_length": 32}
    engine = dlm.Engine(
        lm, kernels="torch", num_pages=40, max_num_tokens=64 if "attention" in shape else 256, max_num_requests=8
    )
    engine.generate([[5] * 4] * 8, **settings)  # tables that stay
    plan = engine.memory
    assert plan.weights == sum(x.numel() * x.element_size() for x in lm.network.parameters())
    assert plan.pages == sum(x.numel() * x.element_size() for x in (engine.batch.pool.k, engine.batch.pool.v))
    peak = peak_of(lambda: engine.generate([[7] * 4] * 8, **settings))
    print(f"{peak:,} of {plan.activations:,} planned bytes")
    assert plan.activations / 4 < peak <= plan.activations


def test_weights_are_packed_before_pages_are_sized(monkeypatch):
    lm, seen = tiny_lm(), []

    def free(device: torch.device) -> int:
        seen.append(lm.network.layers[0].attn.packed is not None and lm.network.layers[0].mlp.packed is not None)
        return 2**30

    monkeypatch.setattr(memory, "free_memory", free)
    dlm.Engine(lm, max_num_requests=2)
    assert seen == [True]


@pytest.mark.parametrize("fraction", [0.5, 1.0])
def test_pages_on_a_gpu_leave_room_for_steps(fraction, monkeypatch):
    lm = tiny_lm(vocab_size=2000)
    with fake_gpu(monkeypatch, lm):
        config = EngineConfig(max_num_tokens=512, max_num_requests=64, memory_fraction=fraction)
        needed = memory.planned(lm, config.model_copy(update={"num_pages": 1}), None, 0, True, True)
        needed = needed.activations + needed.graphs
        monkeypatch.setattr(memory, "free_memory", lambda device: needed + 2**20)
        if fraction == 1:
            plan = dlm.Engine.of(lm, config).memory
            assert 2**20 - memory.page_bytes(lm, 32) < plan.pages <= 2**20 and plan.graphs and "cuda:0" in str(plan)
            monkeypatch.setattr(memory, "free_memory", lambda device: needed + 100)
            refused("beside .* MiB that steps need: raise it, or make", dlm.Engine.of, lm, config)
        else:
            assert dlm.Engine.of(lm, config).memory.pages <= (needed + 2**20) / 2


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("DefaultCPUAllocator: can't allocate memory")]
)
@pytest.mark.parametrize("place", ["engine.PagePool", "step.Compute"])
def test_no_memory_at_the_start_says_what_to_lower(place, error, monkeypatch):
    def none_left(*_: object) -> None:
        raise error

    monkeypatch.setattr(f"dlm.inference.{place}", none_left)
    fixes = r"Lower memory_fraction \(0.8\), max_num_tokens \(8192\) or max_num_requests \(2\), or .* \(quantize\)"
    refused(rf"weights 0.00, graphs 0.00, pages .* GiB of .* {fixes}", dlm.Engine, tiny_lm(), max_num_requests=2)


def test_other_errors_stay_what_they_are(monkeypatch):
    def broken(*_: object) -> None:
        raise RuntimeError("a kernel is missing")

    monkeypatch.setattr("dlm.inference.engine.PagePool", broken)
    with pytest.raises(RuntimeError, match="a kernel is missing"):
        dlm.Engine(tiny_lm(), num_pages=2)


def test_no_memory_while_warming_up_says_what_to_lower(monkeypatch):
    engine = dlm.Engine(tiny_lm(), num_pages=20, max_num_requests=2)

    def none_left(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(type(engine.batch.stepper), "run", none_left)
    refused("Lower num_pages \\(20\\), max_num_tokens", engine.warm_up, lengths=(8,), gen_length=8)
    assert engine.stats().pages_used == 0


def test_a_server_on_a_gpu_warms_up_before_it_takes_requests(monkeypatch, capsys):
    lm = text_lm()
    with fake_gpu(monkeypatch, lm) as gpu:
        settings = {"engine": {"num_pages": 80, "max_num_requests": 4}, "sampler": {"rule": "threshold", "steps": 4}}
        server = Server(ServeConfig(**settings), lm)
        server.load()
        warm = len(gpu.steps)
        assert warm and sum(step.captures for step in gpu.steps) >= 3 and server.ready
        assert server.runner.engine.stats().tokens == 0
        server.close()
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert lines[0]["event"] == "memory" and "memory on cuda:0: weights" in lines[0]["plan"]
    assert [line["done"] for line in lines[1:]] == [1, 2, 3] and lines[-1]["of"] == 3


def test_a_command_on_a_gpu_warms_up_and_says_what_memory_is_for(monkeypatch, capsys):
    lm = text_lm()
    with fake_gpu(monkeypatch, lm) as gpu:
        sampler = SamplerConfig(gen_length=64, block_length=8)
        jobs = [JobConfig(prompt=text, request_id=text, sampler=sampler) for text in ("abc", "def")]
        with Printer(OutputConfig(quiet=False, live=False)) as printer:
            results = decode(lm, jobs, printer, EngineConfig(num_pages=40))
    errors = capsys.readouterr().err
    assert "dlm-infer: memory on cuda:0: weights" in errors and "dlm-infer: warmed up 1 of 1" in errors
    assert all(result.nfe == 64 or result.nfe == 128 for result in results)
    first = next(i for i, step in enumerate(gpu.steps) if step.captures)
    assert first < 32 and not any(step.captures for step in gpu.steps[-30:])
