"""A generation as lm-eval asks for one: what it is decoded with, and its text cut where the task says. Needs lm-eval."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lm_eval.models.utils import normalize_gen_kwargs

from dlm.errors import UserError
from dlm.inference.config import SamplerConfig
from dlm.inference.decoding import Decoding, continuations
from dlm.inference.keywords import settings_of
from dlm.inference.plan import Plan
from dlm.inference.request import Generation
from dlm.models.lm import LM

WHERE = "HarnessLM()"


@dataclass(frozen=True, kw_only=True)
class Until:
    """What ends a generation, and the sampler's settings for it."""

    most: int
    """Tokens it may have. `sampler.gen_length` is this in whole blocks."""
    ends: tuple[str, ...]
    """Texts before which it ends."""
    sampler: SamplerConfig

    @classmethod
    def of(cls, lm: LM, settings: Mapping[str, Any], task: Mapping[str, Any]) -> "Until":
        """The model's `settings`, under those that the task names in its `generation_kwargs`."""
        asked: dict[str, Any] = dict(normalize_gen_kwargs(dict(task)))
        most, ends = int(asked["max_gen_toks"]), tuple(filter(None, asked["until"]))
        samples = (asked.get("temperature") or 0.0) > 0
        taken = {name: asked[name] for name in ("temperature", "top_k", "top_p") if samples and asked.get(name)}
        # Temperature 0 is named: else the one that the model recommends would hold.
        sampler, _ = settings_of(WHERE, {"temperature": 0.0, **settings, **taken, "stop": ends})
        plan = Plan(config=lm.config, block_length=sampler.block_length, steps=sampler.steps)
        return cls(most=most, ends=ends, sampler=sampler.model_copy(update={"gen_length": plan.whole_blocks(most)}))

    def room(self, context_length: int) -> int:
        """Tokens that a prompt may have."""
        length = self.sampler.gen_length
        assert isinstance(length, int)
        if length >= context_length:
            raise UserError(
                f"{length} tokens to generate leave no room for a prompt in a context of {context_length}: "
                "give the task a smaller max_gen_toks"
            )
        return context_length - length

    def decoding(self, lm: LM, prompt: list[int], number: int) -> Decoding:
        """The request of the prompt with this number."""
        (one,) = continuations(lm, [prompt], self.sampler, where="generate_until()", request_ids=[str(number)])
        return one

    def cut(self, lm: LM, result: Generation) -> tuple[str, str]:
        """The text without what whole blocks have beyond the length that was asked for, and how it ended."""
        if len(result.tokens) <= self.most:
            return result.text, result.finish_reason
        text = lm.decode(result.tokens[: self.most])
        ends = [at for at in map(text.find, self.ends) if at >= 0]
        return text[: min(ends)] if ends else text, "stop" if ends else "length"
