"""What a task of the suite is: items, how each is put to a model, and what came of it. Decodes through one engine."""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from dlm.errors import UserError
from dlm.evaluation.filling import SCHEDULED
from dlm.evaluation.rate import Rate
from dlm.evaluation.sandbox import Sandbox
from dlm.evaluation.suite.config import DecodingSection, EvalConfig, TaskSection

if TYPE_CHECKING:
    from dlm.inference.config import SamplerConfig
    from dlm.inference.decoding import Decoding
    from dlm.inference.request import Generation
    from dlm.models.lm import LM

Record = dict[str, Any]
"""What became of one item: plain values, one line of the records."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What a trial is made with beside its model and its section."""

    config: EvalConfig
    sandbox: Sandbox

    @property
    def seed(self) -> int:
        return self.config.eval.seed

    def limit(self, task: TaskSection) -> int | None:
        """Items at most."""
        limits = [limit for limit in (task.limit, self.config.eval.limit) if limit is not None]
        return min(limits, default=None)


class Trial:
    """A task with a model at hand. `names`, `prompt` and `judge` are what a new one must have."""

    infill: ClassVar[bool] = False
    measure: ClassVar[str] = "correct"
    """The key of a record that says how good an answer was; 0 to 1, or True."""
    decodes: ClassVar[bool] = True
    """Whether decodings matter to it: likelihoods are measured once a model."""

    def __init__(self, lm: "LM", task: TaskSection, setting: Setting) -> None:
        self.lm, self.task, self.setting = lm, task, setting
        self.names: list[str] = []

    def prompt(self, number: int) -> "str | list[int]":
        """What an item shows the model; with `infill`, with its holes."""
        raise NotImplementedError

    def masks(self, number: int) -> int:
        """Tokens that are to be decided."""
        return self.task.gen_length

    def stop(self) -> tuple[str, ...]:
        """What ends an answer."""
        return ()

    def judge(self, numbers: Sequence[int], answers: "Sequence[Sequence[Generation]]") -> list[Record]:
        """A record of each item, from its samples."""
        raise NotImplementedError

    def truth(self, number: int) -> Any:
        """What an item asks and what is right, in the data's own words: nothing of it depends on the model."""
        raise NotImplementedError

    def digest_of(self, number: int) -> str:
        """Of an item: a record is of no use once it is another one."""
        return blake2b(
            repr((self.names[number], self.truth(number))).encode("utf-8", "replace"), digest_size=8
        ).hexdigest()

    def digest(self) -> str:
        """Of all items."""
        items = "".join(self.digest_of(number) for number in range(len(self.names)))
        return blake2b(items.encode(), digest_size=16).hexdigest()

    # How items are decoded: the same for all.

    def decoding(self, number: int, way: DecodingSection) -> "list[Decoding]":
        """An item's request, once a sample, as this way of decoding makes it."""
        from dlm.inference.decoding import continuations, infillings

        make = infillings if self.infill else continuations
        sampler = self.sampler(number, way)
        ids = [str(number)]
        return make(self.lm, [self.prompt(number)], sampler, where=f'task "{self.task.label}"', request_ids=ids)

    def sampler(self, number: int, way: DecodingSection) -> "SamplerConfig":
        """The settings of an item: the decoding's, with what the task says of lengths."""
        from dlm.inference.keywords import sampler_of

        given, masks = {"seed": self.setting.seed, **way.given}, self.masks(number)
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
        samples = getattr(self.task, "samples", 1)
        if samples > 1 and not self.infill:
            given["num_samples"] = samples
        return sampler_of(where, given, holes=self.infill)

    def _whole_blocks(self, given: dict[str, Any]) -> Any:
        from dlm.inference.plan import Plan

        if given["gen_length"] == "auto":
            return "auto"
        plan = Plan(config=self.lm.config, block_length=given.get("block_length"), steps=None)
        block = plan.length_of_block(given["gen_length"])
        return -(-given["gen_length"] // block) * block

    @staticmethod
    def _steps(masks: int, block: int | None, pace: int) -> int:
        size = masks if block is None else max(1, min(block, masks))
        return max(1, -(-size // pace) * -(-masks // max(1, size)))

    def answers(self, numbers: Sequence[int], way: DecodingSection) -> "list[list[Generation]]":
        """Each item's samples; `numbers` go through one engine together."""
        from dlm.inference.generation import run

        each = [self.decoding(number, way) for number in numbers]
        flat = [one for several in each for one in several]
        if not flat:
            return []
        config = self.setting.config.engine.with_cache(way.cache)
        results = iter(run(self.lm, flat, config, self.setting.config.eval.batch_size))
        return [[next(results) for _ in several] for several in each]

    # What records come to.

    def summary(self, records: Sequence[Record]) -> dict[str, Any]:
        """The figures of a run."""
        rate = Rate.of(record[self.measure] for record in records)
        return {self.measure: rate.to_dict(), **effort(records)}

    def value(self, record: Record) -> float:
        """How good one answer was: what runs are compared by."""
        return float(record[self.measure])


def spent(answers: "Sequence[Generation]") -> Record:
    """What a record says of decoding: tokens, forwards, how many answers were cut by their length."""
    return {
        "tokens": sum(len(answer.tokens) for answer in answers),
        "nfe": sum(answer.nfe for answer in answers),
        "length_stops": sum(answer.finish_reason == "length" for answer in answers),
    }


def effort(records: Sequence[Record]) -> dict[str, Any]:
    """Forwards an item and tokens a forward, over all."""
    tokens, nfe = (sum(record[name] for record in records) for name in ("tokens", "nfe"))
    stops = sum(record["length_stops"] for record in records)
    return {"nfe": nfe / max(1, len(records)), "tpf": tokens / nfe if nfe else None, "length_stops": stops}


def data_digest(path: str | Path) -> str:
    """Of the bytes of a file, or of all files of a folder."""
    path, digest = Path(path), blake2b(digest_size=16)
    for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
        if file.is_file():
            digest.update(f"{file.relative_to(path)}\0".encode("utf-8", "replace") + file.read_bytes())
    return digest.hexdigest()
