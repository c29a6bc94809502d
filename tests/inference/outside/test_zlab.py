"""z-lab's own loop on the same random target and draft, in fp32: the same tokens, the same numbers accepted.

pip download --no-deps dflash==0.1.0 && unzip -q dflash-*.whl -d zlab
PYTHONPATH=zlab python -m pytest -m outside tests/inference/outside
"""

import random
import time
from typing import Any

import pytest
import torch

import dlm
from dlm.models.draft import Draft

from ..requests import FAMILIES
from ..speculative import SECOND
from ..tiny import tiny_lm

pytestmark = [pytest.mark.outside, pytest.mark.filterwarnings("default")]
zlab: Any = pytest.importorskip("dflash.model", reason="pip download --no-deps dflash==0.1.0: see above")
KINDS = {
    "DFlash": {},
    "DFlash 2": SECOND,
    "sliding, causal": {"windows": (6, None), "causal": (True, False)},
    "sliding to both sides": {"windows": (6, 6), "causal": (False, False)},
}
PROMPTS = 50


@pytest.mark.parametrize("kind", KINDS)
def test_its_loop_writes_and_accepts_the_same(kind, tmp_path, monkeypatch):
    from transformers import AutoModelForCausalLM

    monkeypatch.setattr(zlab, "_cuda_time", time.perf_counter)
    lm = tiny_lm(7, spread=0.4, **{**FAMILIES["llama"], "vocab_size": 12, "num_hidden_layers": 5})
    lm.save(tmp_path / "target")
    generator = torch.Generator().manual_seed(5)
    draft = Draft.fresh(lm, num_layers=2, block_size=6, mask_token_id=11, generator=generator, **KINDS[kind])
    with torch.no_grad():
        for name, parameter in draft.named_parameters():
            if "projection" in name or "codebook" in name:
                parameter += 0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3))
    draft.save(tmp_path / "draft")
    target = AutoModelForCausalLM.from_pretrained(tmp_path / "target", dtype=torch.float32).eval()
    loader = zlab.DFlash2DraftModel if kind == "DFlash 2" else zlab.DFlashDraftModel
    theirs = loader.from_pretrained(tmp_path / "draft", dtype=torch.float32).eval()
    draw, kept = random.Random(1), 0
    for _ in range(PROMPTS):
        prompt = [draw.randrange(11) for _ in range(draw.randrange(2, 20))]
        length, size = draw.choice((2, 4, 5)), draw.randrange(2, 30)
        told = zlab.dflash_generate(
            theirs, target, torch.tensor([prompt]), size, None, block_size=length + 1, return_stats=True
        )
        (ours,) = dlm.generate(lm, [prompt], draft=draft, draft_length=length, gen_length=size)
        assert ours.tokens == told.output_ids[0, len(prompt) :].tolist()
        assert ours.accepted == told.acceptance_lengths
        kept += sum(ours.accepted) - len(ours.accepted)
    assert kept > 0
