"""Where two greedy texts part, and how near their tokens are, against logits taken by hand."""

import pytest
import torch

pytest.importorskip("lm_eval", reason="needs the extra `eval`")
pytestmark = pytest.mark.filterwarnings("ignore")  # lm-eval's own

from dlm.evaluation import HarnessLM  # noqa: E402
from tests.inference.tiny import EOS, text_lm  # noqa: E402


def test_the_place_and_the_gap(script):
    lm = text_lm(seed=3, spread=0.5, attention="causal", model_type="qwen3", shifted_logits=True)
    ours = HarnessLM(lm)
    for one, other, at in (("same then a", "same then b", 10), ("short", "short and more", 5)):
        found = script("harness").parting(ours, one, other, "a prompt: ")
        assert found["token"] == at
        ids = lm.encode("a prompt: " + one)[: len("a prompt: ") + at]
        with torch.no_grad():
            logits = lm.network(torch.tensor([ids]))[0, -1].double()
        tokens = [[*lm.encode(text), EOS][at] for text in (one, other)]
        assert found["gap"] == pytest.approx(abs(logits[tokens[0]] - logits[tokens[1]]).item(), rel=1e-4)
        assert found["best_two"] == (set(logits.topk(2).indices.tolist()) == set(tokens))
