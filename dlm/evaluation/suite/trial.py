"""The base of all tasks of the suite. A trial is a task put to one model: its items, and the figures of a run over them."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from dlm.errors import UserError
from dlm.evaluation.sandbox import Sandbox
from dlm.evaluation.suite.config import EvalConfig
from dlm.evaluation.suite.decoding_section import DecodingSection
from dlm.evaluation.suite.task_section import TaskSection

if TYPE_CHECKING:
    from dlm.data.config import DataConfig
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


class Trial(ABC):
    """A task with a model at hand. A new one derives from `Decoded` or, if it is measured in one piece, from `Whole`."""

    measure: ClassVar[str] = "correct"
    """The key of a record that says how good an answer was; 0 to 1, or True."""
    decodes: ClassVar[bool] = True
    """Whether decodings matter to it: likelihoods are measured once a model."""

    def __init__(self, lm: "LM", task: TaskSection, setting: Setting) -> None:
        self.lm, self.task, self.setting = lm, task, setting
        self.names: list[str] = []

    @abstractmethod
    def truth(self, number: int) -> Any:
        """What an item asks and what is right, in the data's own words: nothing of it depends on the model."""

    @abstractmethod
    def check(self, way: DecodingSection) -> None:
        """Raises UserError where the task cannot be decoded so; called before any work."""

    def digest_of(self, number: int) -> str:
        """Of an item: a record is of no use once it is another one."""
        return blake2b(
            repr((self.names[number], self.truth(number))).encode("utf-8", "replace"), digest_size=8
        ).hexdigest()

    def digest(self) -> str:
        """Of all items."""
        items = "".join(self.digest_of(number) for number in range(len(self.names)))
        return blake2b(items.encode(), digest_size=16).hexdigest()

    @abstractmethod
    def summary(self, records: Sequence[Record]) -> dict[str, Any]:
        """The figures of a run."""

    def value(self, record: Record) -> float:
        """How good one answer was: what runs are compared by."""
        return float(record[self.measure])

    def size(self, record: Record) -> float:
        """What values are summed over: a run's figure is the sum of its values over the sum of its sizes."""
        return 1.0


class Whole(Trial):
    """A task that is measured in one piece."""

    def check(self, way: DecodingSection) -> None:
        if way.draft != "none":
            raise UserError(f'task "{self.task.label}" with decoding "{way.label}": this task is asked without a draft')

    @abstractmethod
    def measured(self, way: DecodingSection) -> list[Record]:
        """Its records."""


def heldout(task: TaskSection) -> "DataConfig":
    """The held-out split of the task's text folder, or of the standard library."""
    from dlm.data.config import DataConfig
    from dlm.data.lines import STDLIB

    return STDLIB if task.data is None else DataConfig(source="text", paths=(task.data,))


def heldout_digest(data: "DataConfig") -> str:
    """Of the held-out texts: those of the standard library are another Python's others."""
    from dlm.data.source import rows_of

    digest = blake2b(digest_size=16)
    for row in rows_of(data, "heldout"):
        digest.update(repr((row.key, row.value)).encode("utf-8", "replace"))
    return digest.hexdigest()


def data_digest(path: str | Path) -> str:
    """Of the bytes of a file, or of all files of a folder."""
    path, digest = Path(path), blake2b(digest_size=16)
    for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
        if file.is_file():
            digest.update(f"{file.relative_to(path)}\0".encode("utf-8", "replace") + file.read_bytes())
    return digest.hexdigest()
