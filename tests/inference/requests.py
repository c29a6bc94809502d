"""Families, prompts and requests that tests of the engine share."""

import torch

import dlm
from dlm.inference import decide
from dlm.inference.readers import READ_BY
from dlm.inference.reference import sample

MASK = 63
FAMILIES: dict[str, dict] = {
    "llada": {},
    "Dream": {"model_type": "Dream", "shifted_logits": True},
    "sdar": {"model_type": "sdar", "attention": "block_causal", "block_length": 4},
}
FAMILIES["Fast_dLLM_Qwen"] = {**FAMILIES["sdar"], "model_type": "Fast_dLLM_Qwen", "shifted_logits": True}
FAMILIES["llama"] = {"model_type": "llama", "attention": "causal", "shifted_logits": True}
FAMILIES["llama"] |= {"mask_token_id": None, "mask_in_softmax": False}
CACHED = ["sdar", "Fast_dLLM_Qwen", "llama"]
RULE = {"rule": "threshold", "threshold": 0.4}
MIXED = [
    {"gen_length": 8, "block_length": 4, **RULE},
    {"gen_length": 4, "block_length": 4, "temperature": 0.8, "seed": 2},
    {"gen_length": 12, "block_length": 4, "rule": "entropy_threshold", "strategy": "multi_block"},
]
"""Requests of several kinds, for one engine at a time."""


def of_rule(rule: str, **settings: float) -> dict:
    """The rule, and those of the settings that it reads."""
    return {"rule": rule, **{name: value for name, value in settings.items() if rule in READ_BY[name]}}


def ids(seed: int, length: int) -> list[int]:
    return torch.randint(0, 60, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def prompts(count: int) -> list[list[int]]:
    return [ids(i, 1 + (7 * i) % 19) for i in range(count)]


def holes(count: int) -> list[list[int]]:
    return [[*ids(i, 2 + i), MASK, MASK, *ids(i + 50, i % 5), *[MASK] * (1 + i), 5] for i in range(count)]


def reference(lm, decodings) -> list[list[int]]:
    first = decodings[0]
    outcomes = sample(lm.network, [d.request for d in decodings], first.plan, first.rule, first.settings, first.stop)
    return [
        list(o.ids[len(d.request.ids) :][: d.request.gen_length]) if d.request.gen_length else list(o.ids)
        for o, d in zip(outcomes, decodings, strict=True)
    ]


def drive(lm, decodings, **engine) -> list[dlm.Generation]:
    return dlm.Engine(lm, **engine).run(decodings)


def tokens(results: list[dlm.Generation]) -> list[list[int]]:
    return [result.tokens for result in results]


def logits(monkeypatch, lm, decodings, **engine) -> dict[str, list[torch.Tensor]]:
    """Of every request those of each step, decoded together."""
    seen: dict[str, list[torch.Tensor]] = {}
    original = decide.Round.compute

    def listening(self, network, head, hidden, x):
        found = self.recipe.logits(network, head, hidden, x)
        for seq, part in zip(self.seqs, found.split([int(asked.sum()) for asked in self.asked]), strict=True):
            seen.setdefault(seq.request.request_id, []).append(part.clone())
        return original(self, network, head, hidden, x)

    with monkeypatch.context() as patch:
        patch.setattr(decide.Round, "compute", listening)
        drive(lm, decodings, **engine)
    return seen
