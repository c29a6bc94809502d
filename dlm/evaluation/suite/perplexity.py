"""Held-out texts written on: how likely a judge finds what is written, how varied it is, and how often it loops."""

import math
import random
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from dlm.data.lines import heldout_lines
from dlm.errors import UserError
from dlm.evaluation.rate import Rate
from dlm.evaluation.suite.decoded import Decoded, effort, spent
from dlm.evaluation.suite.task_section import TaskSection
from dlm.evaluation.suite.trial import Record, Setting, heldout

if TYPE_CHECKING:
    from dlm.inference.request import Generation
    from dlm.models.lm import LM

TEXTS = 64
"""Without a limit."""
SHOWN = 32
"""Tokens before a line of code that are shown; the line and what follows is to be written."""
GRAM, MOST = 4, 3
"""A loop: a run of GRAM tokens more than MOST times."""
SUMMED = {"nats", "judged_tokens", "bytes", "entropy"}
SUMMED |= {"real_nats", "real_bytes", "real_entropy", "shuffled_nats", "shuffled_bytes"}


class Perplexity(Decoded):
    """Bits a byte of what a model writes, under a causal checkpoint, beside those of the real text and of its tokens shuffled.

    Repetition lowers them, and noise raises the entropy: so loops and entropy stand beside them.
    """

    measure = "bits_per_byte"

    def __init__(self, lm: "LM", task: TaskSection, setting: Setting) -> None:
        from dlm.models.fingerprint import weights_digest
        from dlm.models.loading import load

        super().__init__(lm, task, setting)
        self.judging = load(task.require("judge"), device=setting.config.eval.device)
        if self.judging.network.attention.kind != "causal":
            raise UserError(
                f'task "{task.label}": judge = "{task.judge}" is no causal model: its likelihoods would be bounds alone'
            )
        self.judged_by = weights_digest(self.judging.network)
        self.lines = heldout_lines(heldout(task), setting.limit(task) or TEXTS, setting.seed)
        self.names = [line.name for line in self.lines]
        begun = lm.require_tokenizer().begun
        self.prompts = [begun(lm.encode(line.prefix)[-SHOWN:]) for line in self.lines]

    def prompt(self, number: int) -> list[int]:
        return self.prompts[number]

    def real(self, number: int) -> str:
        """As much of the text that really follows as may be written."""
        line = self.lines[number]
        return self.lm.decode(
            self.lm.encode((line.line + line.suffix)[: 16 * self.task.gen_length])[: self.task.gen_length]
        )

    def shuffled(self, number: int) -> str:
        """That text with its tokens in another order: as varied as the real one, and no text."""
        tokens = self.lm.encode(self.real(number))
        return self.lm.decode(random.Random(f"{self.setting.seed} {self.names[number]}").sample(tokens, len(tokens)))

    def truth(self, number: int) -> Any:
        return vars(self.lines[number]), self.judged_by, "shuffled too"

    def judge(self, numbers: Sequence[int], answers: "Sequence[Sequence[Generation]]") -> list[Record]:
        from dlm.evaluation.score import score

        shown = [self.lm.decode(self.prompts[number]) for number in numbers]
        texts = [several[0].text for several in answers]
        written = score(self.judging, list(zip(shown, texts, strict=True)))
        reals = [self.real(number) for number in numbers]
        real = score(self.judging, list(zip(shown, reals, strict=True)))
        mixed = score(self.judging, list(zip(shown, map(self.shuffled, numbers), strict=True)))
        tokens = [self.lm.encode(text) for text in reals]
        return [
            {
                "item": self.names[number],
                "nats": found.nats,
                "judged_tokens": found.tokens,
                "bytes": found.bytes,
                "real_nats": true.nats,
                "real_bytes": true.bytes,
                "real_entropy": entropy(followed),
                "real_loops": loops(followed),
                "shuffled_nats": other.nats,
                "shuffled_bytes": other.bytes,
                "entropy": entropy(answer.tokens),
                "loops": loops(answer.tokens),
                "text": text,
                **spent([answer]),
            }
            for number, found, true, other, followed, text, (answer, *_) in zip(
                numbers, written, real, mixed, tokens, texts, answers, strict=True
            )
        ]

    def value(self, record: Record) -> float:
        return -record["nats"] / math.log(2)

    def size(self, record: Record) -> float:
        return float(record["bytes"])

    def summary(self, records: Sequence[Record]) -> dict[str, Any]:
        total = {name: sum(record[name] for record in records) for name in records[0] if name in SUMMED}
        nats, tokens, size = total["nats"], total["judged_tokens"], total["bytes"]
        count, bits = len(records), nats / math.log(2) / max(1, size)
        off = [record["nats"] / math.log(2) - bits * record["bytes"] for record in records]  # of a ratio of two sums
        error = (sum(value**2 for value in off) * count / max(1, count - 1)) ** 0.5 / max(1, size)
        return {
            "bits_per_byte": bits,
            "bits_error": error if count > 1 else None,
            "perplexity": math.exp(nats / max(1, tokens)),
            "entropy": total["entropy"] / count,
            "loops": Rate.of(record["loops"] for record in records).to_dict(),
            "real text": total["real_nats"] / math.log(2) / max(1, total["real_bytes"]),
            "its entropy": total["real_entropy"] / count,
            "its loops": Rate.of(record["real_loops"] for record in records).to_dict(),
            "shuffled": total["shuffled_nats"] / math.log(2) / max(1, total["shuffled_bytes"]),
            **effort(records),
        }


def entropy(tokens: Sequence[int]) -> float:
    """Nats of the distribution of a text's own tokens: 0 where one is repeated, log n where all n differ."""
    counts = Counter(tokens).values()
    return sum(-c / len(tokens) * math.log(c / len(tokens)) for c in counts) if tokens else 0.0


def loops(tokens: Sequence[int], gram: int = GRAM, most: int = MOST) -> bool:
    """Whether some run of `gram` tokens occurs more than `most` times."""
    runs = Counter(tuple(tokens[i : i + gram]) for i in range(len(tokens) - gram + 1))
    return max(runs.values(), default=0) > most
