"""Tensor parallelism: two processes that share the layers decode what one decodes."""

import json
import subprocess
import sys

import pytest
import torch

import dlm
from dlm.models.parallel import check_divisible
from tests.inference.tiny import tiny_lm
from tests.refusals import refused

SCRIPT = """
import json, sys, torch, dlm
torch.set_num_threads(1)
lm = dlm.load(sys.argv[1], device="cpu", tensor_parallel=2)
engine = dlm.Engine(lm)
results = engine.generate([[5, 6, 7], [8, 9]], gen_length=16, block_length=4, rule="threshold", threshold=0.4)
if torch.distributed.get_rank() == 0:
    shares = [p.to_local().numel() if hasattr(p, "to_local") else p.numel() for p in lm.network.layers.parameters()]
    print(json.dumps([[r.tokens for r in results], sum(shares), engine.batch.pool.k.shape[-2]]))
"""

BLOCKS = {"attention": "block_causal", "block_length": 4, "qk_norm": True}
LLADA2 = {"num_experts": 8, "num_experts_per_tok": 3, "intermediate_size": 16, "n_group": 4, "topk_group": 2}
LLADA2 |= {"num_shared_experts": 1, "expert_bias": True, "first_k_dense": 1, "routed_scaling_factor": 2.5}
SHAPES = {
    "llada": {},
    "sdar": {"model_type": "sdar", **BLOCKS},
    "biases": {"model_type": "dlm", "qkv_bias": True, "o_bias": True, "mask_in_softmax": False},
    "llada2": {"model_type": "llada2_moe", **BLOCKS, "moe": LLADA2, "rotary_dim": 4},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SHAPES)
def test_two_processes_that_share_the_layers_give_the_tokens_of_one(tmp_path, name):
    tiny_lm(**SHAPES[name]).save(tmp_path / "model")
    (tmp_path / "run.py").write_text(SCRIPT)
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "run.py", "model"]
    done = subprocess.run([sys.executable, *command], cwd=tmp_path, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-2000:]
    tokens, held, kv_heads = json.loads(done.stdout.strip().splitlines()[-1])
    lm = dlm.load(tmp_path / "model", device="cpu")
    alone = dlm.generate(lm, [[5, 6, 7], [8, 9]], gen_length=16, block_length=4, rule="threshold", threshold=0.4)
    assert tokens == [result.tokens for result in alone]
    weights = lm.network.layers.named_parameters()
    whole = {name: p.numel() for name, p in weights if name.endswith(("norm.weight", "router.weight", "o_proj.bias"))}
    vectors, matrices = (
        sum(whole.values()),
        sum(p.numel() for p in lm.network.layers.parameters()) - sum(whole.values()),
    )
    assert held == vectors + matrices // 2 and kv_heads == lm.config.num_key_value_heads // 2


def test_what_cannot_be_split_is_refused_with_the_numbers():
    refused("tensor_parallel = 3 does not divide num_key_value_heads = 2", check_divisible, tiny_lm().config, 3)


def test_too_few_processes_are_refused_with_the_command(tmp_path):
    tiny_lm().save(tmp_path / "model")
    refused("torchrun --nproc-per-node 2", dlm.load, tmp_path / "model", device="cpu", tensor_parallel=2)
    assert not torch.distributed.is_initialized()


def test_experts_are_shared_out_whole():
    moe = {"num_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 16}
    refused(
        "tensor_parallel = 4 does not divide num_experts = 6",
        check_divisible,
        tiny_lm(num_key_value_heads=4, moe=moe).config,
        4,
    )
    check_divisible(tiny_lm(moe=moe, intermediate_size=47).config, 2)  # no layer is dense


ENDS = """
import os, threading, time, torch
from dlm.models import parallel
torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
mesh, device = parallel.join(1, torch.device("cpu"))
parallel.LAST_WORDS = 1
def drop():  # as a thread of gloo's does, which would abort the process instead of giving up in silence
    time.sleep(0.3)
    os.write(1, b"dropped")
threading.Thread(target=drop, daemon=True).start()
"""


@pytest.mark.parametrize("end", ["", "raise KeyError('lost')"])
def test_a_process_ends_after_its_threads_had_the_interpreter_and_with_its_own_error(tmp_path, end):
    (tmp_path / "run.py").write_text(ENDS + end)
    done = subprocess.run([sys.executable, "run.py"], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.stdout == "dropped" and done.returncode == bool(end), done.stderr
    assert done.stderr.endswith("KeyError: 'lost'\n" if end else "")
