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
torch.distributed.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.parametrize("fields", [{}, {"model_type": "sdar", "attention": "block_causal", "block_length": 4, "qk_norm": True}], ids=["llada", "sdar"])  # fmt: skip
def test_two_processes_that_share_the_layers_give_the_tokens_of_one(tmp_path, fields):
    tiny_lm(**fields).save(tmp_path / "model")
    (tmp_path / "run.py").write_text(SCRIPT)
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "run.py", "model"]
    done = subprocess.run([sys.executable, *command], cwd=tmp_path, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-2000:]
    tokens, held, kv_heads = json.loads(done.stdout.strip().splitlines()[-1])
    lm = dlm.load(tmp_path / "model", device="cpu")
    alone = dlm.generate(lm, [[5, 6, 7], [8, 9]], gen_length=16, block_length=4, rule="threshold", threshold=0.4)
    assert tokens == [result.tokens for result in alone]
    vectors = sum(p.numel() for p in lm.network.layers.parameters() if p.ndim == 1)
    matrices = sum(p.numel() for p in lm.network.layers.parameters() if p.ndim > 1)
    assert held == vectors + matrices // 2 and kv_heads == lm.config.num_key_value_heads // 2


def test_what_cannot_be_split_is_refused_with_the_numbers():
    refused("tensor_parallel = 3 does not divide num_key_value_heads = 2", check_divisible, tiny_lm().config, 3)


def test_too_few_processes_are_refused_with_the_command(tmp_path):
    tiny_lm().save(tmp_path / "model")
    refused("torchrun --nproc-per-node 2", dlm.load, tmp_path / "model", device="cpu", tensor_parallel=2)
    assert not torch.distributed.is_initialized()
