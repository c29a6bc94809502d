"""Tasks whose items are decoded, through one engine: each asks, judges an answer, and says how long one is."""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, ClassVar

from dlm.errors import UserError
from dlm.evaluation.rate import Rate
from dlm.evaluation.suite.decoding_section import DecodingSection
from dlm.evaluation.suite.task_section import TaskSection
from dlm.evaluation.suite.trial import Record, Setting, Trial

if TYPE_CHECKING:
    from dlm.inference.config import SamplerConfig
    from dlm.inference.decoding import Decoding
    from dlm.inference.request import Generation
    from dlm.models.lm import LM


SCHEDULED = ("low_confidence", "random", "margin", "entropy")
"""Rules that commit a number of tokens set beforehand; the others decide by what they see."""


@dataclass(frozen=True, kw_only=True)
class Recording:
    """Where the steps of a run's items go."""

    store: Any
    run: str

    def name(self, item: str) -> str:
        """What an item's trace is called."""
        return f"{self.run} {item}"


class Decoded(Trial):
    """`names`, `prompt`, `judge` and `truth` are what a new one must have."""

    infill: ClassVar[bool] = False

    def __init__(self, lm: "LM", task: TaskSection, setting: Setting) -> None:
        super().__init__(lm, task, setting)
        self._drafts: dict[str, Any] = {}

    @abstractmethod
    def prompt(self, number: int) -> "str | list[int]":
        """What an item shows the model; with `infill`, with its holes."""

    @abstractmethod
    def judge(self, numbers: Sequence[int], answers: "Sequence[Sequence[Generation]]") -> list[Record]:
        """A record of each item, from its samples."""

    def masks(self, number: int) -> int:
        """Tokens that are to be decided."""
        return self.task.gen_length

    def stop(self) -> tuple[str, ...]:
        """What ends an answer."""
        return ()

    def check(self, way: DecodingSection) -> None:
        self.draft(way)
        if self.names:
            self.decoding(0, way)

    def decoding(self, number: int, way: DecodingSection, into: "Recording | None" = None) -> "list[Decoding]":
        """An item's request, once a sample, as this way of decoding makes it."""
        from dlm.inference.decoding import continuations, infillings

        make = infillings if self.infill else continuations
        sampler = self.sampler(number, way)
        ids = [str(number) if into is None else into.name(self.names[number])]
        return make(self.lm, [self.prompt(number)], sampler, where=f'task "{self.task.label}"', request_ids=ids)

    def draft(self, way: DecodingSection) -> Any:
        """The draft of this decoding, or None. Each is loaded once and kept for the task's other decodings."""
        if way.draft == "none":
            return None
        from dlm.inference.drafting.making import named

        where = f'task "{self.task.label}" with decoding "{way.label}"'
        if self.infill:
            raise UserError(f"{where}: a draft continues a text, and this task fills holes: leave draft out")
        if way.draft not in self._drafts:
            self._drafts[way.draft] = named(way.draft, self.lm, where)
        return self._drafts[way.draft]

    def sampler(self, number: int, way: DecodingSection) -> "SamplerConfig":
        """The settings of an item: the decoding's, with what the task says of lengths.

        A decoding that names nothing is the one that the model recommends; what another one leaves out is the default.
        """
        from dlm.inference.keywords import sampler_of
        from dlm.inference.recommended import recommended

        given, masks = {**way.given, "seed": self.seed(number, way)}, self.masks(number)
        where = f'task "{self.task.label}" with decoding "{way.label}"'
        if self.infill:
            given = {name: value for name, value in given.items() if name not in ("gen_length", "stop")}
        else:
            given = {"stop": self.stop(), "gen_length": masks, **given}
            given["gen_length"] = self._whole_blocks(given)
            masks = given["gen_length"] if isinstance(given["gen_length"], int) else masks
        if self.infill and given.get("block_length") is not None:
            given["block_length"] = min(given["block_length"], max(1, masks))
        if way.tokens_per_step is not None:
            if given.get("rule", "low_confidence") not in SCHEDULED:
                raise UserError(f"{where}: tokens_per_step is only read by the rules {', '.join(SCHEDULED)}")
            given["steps"] = self._steps(masks, given.get("block_length"), way.tokens_per_step)
        if self.task.samples > 1:  # no task with holes has more
            given["num_samples"] = self.task.samples
        found = sampler_of(where, given, holes=self.infill)
        if way.given or way.tokens_per_step is not None:
            advised = recommended(self.lm, "infill" if self.infill else "generate").model_fields_set
            found = found.model_copy(update={name: getattr(found, name) for name in advised})  # they count as named
        return found

    def _whole_blocks(self, given: dict[str, Any]) -> Any:
        from dlm.inference.plan import Plan

        if given["gen_length"] == "auto":
            return "auto"
        plan = Plan(config=self.lm.config, block_length=given.get("block_length"), steps=None)
        return plan.whole_blocks(given["gen_length"])

    def seed(self, number: int, way: DecodingSection) -> int:
        """An item's own seed: with one for all, chance would be kind or unkind to all texts at the same places."""
        whole = f"{way.given.get('seed', self.setting.seed)} {self.names[number]}"
        return int.from_bytes(blake2b(whole.encode(), digest_size=7).digest())

    @staticmethod
    def _steps(masks: int, block: int | None, pace: int) -> int:
        size = masks if block is None else max(1, min(block, masks))
        return max(1, -(-size // pace) * -(-masks // max(1, size)))

    def answers(
        self, numbers: Sequence[int], way: DecodingSection, into: "Recording | None" = None
    ) -> "list[list[Generation]]":
        """Each item's samples; `numbers` go through one engine together."""
        from dlm.inference.generation import run

        each = [self.decoding(number, way, into) for number in numbers]
        flat = [one for several in each for one in several]
        if not flat:
            return []
        config, size = self.setting.config.engine.with_cache(way.cache), self.setting.config.eval.batch_size
        results = iter(run(self.lm, flat, config, size, trace=into and into.store, draft=self.draft(way)))
        return [[next(results) for _ in several] for several in each]

    def summary(self, records: Sequence[Record]) -> dict[str, Any]:
        rate = Rate.of(record[self.measure] for record in records)
        return {self.measure: rate.to_dict(), **effort(records)}


def spent(answers: "Sequence[Generation]") -> Record:
    """What a record says of decoding: tokens, forwards, how many answers were cut by their length.

    With a draft `nfe` counts the forwards of the model, and `draft_nfe` those of the draft.
    """
    drafted = [answer.draft_nfe for answer in answers if answer.draft_nfe is not None]
    return {
        "tokens": sum(len(answer.tokens) for answer in answers),
        "nfe": sum(answer.nfe for answer in answers),
        "length_stops": sum(answer.finish_reason == "length" for answer in answers),
        **({"draft_nfe": sum(drafted)} if drafted else {}),
    }


def effort(records: Sequence[Record]) -> dict[str, Any]:
    """Forwards an item and tokens a forward, over all."""
    tokens, nfe = (sum(record[name] for record in records) for name in ("tokens", "nfe"))
    stops = sum(record["length_stops"] for record in records)
    found = {"nfe": nfe / max(1, len(records)), "tpf": tokens / nfe if nfe else None, "length_stops": stops}
    drafted = [record["draft_nfe"] for record in records if "draft_nfe" in record]
    return found | ({"draft_nfe": sum(drafted) / len(records)} if drafted else {})
