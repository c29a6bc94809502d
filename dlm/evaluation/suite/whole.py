"""Tasks that are measured in one piece: the bound of held-out text, the perplexity of what is written, lm-eval's tasks."""

import math
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from dlm.errors import UserError
from dlm.evaluation.suite.config import DecodingSection, TaskSection
from dlm.evaluation.suite.decoded import Decoded, effort, spent
from dlm.evaluation.suite.trial import Record, Setting, Whole, data_digest

if TYPE_CHECKING:
    from dlm.data.config import DataConfig
    from dlm.inference.request import Generation
    from dlm.models.lm import LM

TEXTS, SHOWN = 64, 32
"""Texts without a limit, and tokens of each that are shown before it is written on."""


def _data(task: TaskSection) -> "DataConfig":
    """The held-out split of a text folder, or of the standard library."""
    from dlm.data.config import DataConfig
    from dlm.evaluation.about import STDLIB

    return STDLIB if task.data is None else DataConfig(source="text", paths=(task.data,))


class Bound(Whole):
    """What held-out text costs, in bits a byte; an item is a sequence of `length` tokens."""

    decodes, measure = False, "bits_per_byte"

    def __init__(self, lm: "LM", task: TaskSection, setting: Setting) -> None:
        super().__init__(lm, task, setting)
        self.names = ["all"]

    def truth(self, number: int) -> Any:
        data = "stdlib" if self.task.data is None else data_digest(self.task.data)
        return data, self.setting.limit(self.task)

    def measured(self, way: DecodingSection) -> list[Record]:
        """The one record of it all."""
        from dlm.evaluation.bound import measure_bound

        length = min(self.task.length, self.lm.config.context_length)
        count = self.setting.limit(self.task) or TEXTS
        found = measure_bound(
            self.lm, _data(self.task), length=length, sequences=count, draws=self.task.draws, seed=self.setting.seed
        ).to_dict()
        found.pop("seconds")
        return [{"item": "all", **found}]

    def summary(self, records: Sequence[Record]) -> dict[str, Any]:
        return {name: value for name, value in records[0].items() if name != "item"}


class Perplexity(Decoded):
    """Held-out texts written on, and how surprising a causal checkpoint finds that; beside it the entropy of its tokens.

    Repetition lowers both: a low perplexity with a low entropy says nothing good.
    """

    measure = "bits_per_byte"

    def __init__(self, lm: "LM", task: TaskSection, setting: Setting) -> None:
        from dlm.evaluation.lines import heldout_lines
        from dlm.models.loading import load

        super().__init__(lm, task, setting)
        self.judging = load(task.require("judge"), device=setting.config.eval.device)
        if self.judging.network.attention.kind != "causal":
            raise UserError(
                f'task "{task.label}": judge = "{task.judge}" is no causal model: its likelihoods would be bounds alone'
            )
        lines = heldout_lines(_data(task), setting.limit(task) or TEXTS, setting.seed)
        self.names, self.lines = [line.name for line in lines], lines
        self.prompts = [lm.encode(line.prefix)[-SHOWN:] for line in lines]

    def prompt(self, number: int) -> list[int]:
        return self.prompts[number]

    def truth(self, number: int) -> Any:
        return self.lines[number].prefix

    def judge(self, numbers: Sequence[int], answers: "Sequence[Sequence[Generation]]") -> list[Record]:
        from dlm.evaluation.score import score

        pairs = [
            (self.lm.decode(self.prompts[n]), several[0].text) for n, several in zip(numbers, answers, strict=True)
        ]
        scores = score(self.judging, pairs)
        records = []
        for number, found, (answer, *_) in zip(numbers, scores, answers, strict=True):
            facts = {"nats": found.nats, "judged_tokens": found.tokens, "bytes": found.bytes}
            records.append(
                {
                    "item": self.names[number],
                    **facts,
                    "entropy": entropy(answer.tokens),
                    "text": answer.text,
                    **spent([answer]),
                }
            )
        return records

    def value(self, record: Record) -> float:
        return -record["nats"] / math.log(2) / max(1, record["bytes"])

    def summary(self, records: Sequence[Record]) -> dict[str, Any]:
        nats, tokens, size = (sum(record[name] for record in records) for name in ("nats", "judged_tokens", "bytes"))
        values = [self.value(record) for record in records]
        mean = sum(values) / len(values)
        error = (sum((v - mean) ** 2 for v in values) / max(1, len(values) - 1) / len(values)) ** 0.5
        return {
            "bits_per_byte": nats / math.log(2) / max(1, size),
            "bits_error": error if len(values) > 1 else None,
            "perplexity": math.exp(nats / max(1, tokens)),
            "entropy": sum(record["entropy"] for record in records) / len(records),
            **effort(records),
        }


def entropy(tokens: Sequence[int]) -> float:
    """Nats of the distribution of a text's own tokens: 0 where one is repeated, log n where all n differ."""
    counts = Counter(tokens).values()
    return sum(-c / len(tokens) * math.log(c / len(tokens)) for c in counts) if tokens else 0.0


class LmEval(Whole):
    """Tasks of lm-eval, by its own prompts, filters and metrics; the errors of likelihoods stand beside them."""

    def __init__(self, lm: "LM", task: TaskSection, setting: Setting) -> None:
        super().__init__(lm, task, setting)
        self.names = list(task.tasks)

    def truth(self, number: int) -> Any:
        own = None if self.task.include is None else data_digest(self.task.include)
        return self.task.tasks, self.task.shots, self.task.chat, own, self.setting.limit(self.task)

    def measured(self, way: DecodingSection) -> list[Record]:
        """One record a task, with what lm-eval's results say of it and its samples."""
        try:
            import lm_eval
            from lm_eval.tasks import TaskManager
        except ImportError:
            raise UserError(f"task \"{self.task.label}\" needs lm-eval: pip install 'dlm[eval]'") from None
        from dlm.evaluation.harness import HarnessLM

        settings = {**way.given, **({"cache": way.cache} if way.cache != "auto" else {})}
        config = self.setting.config.eval
        model = HarnessLM(
            self.lm, draws=self.task.draws, batch_size=config.batch_size, **{"seed": config.seed, **settings}
        )
        evaluate: Any = lm_eval.simple_evaluate
        found = evaluate(
            model=model,
            tasks=list(self.task.tasks),
            task_manager=self._manager(TaskManager),
            num_fewshot=self.task.shots,
            limit=self.setting.limit(self.task),
            apply_chat_template=self.task.chat,
            bootstrap_iters=1000,
            random_seed=config.seed,
            numpy_random_seed=config.seed,
            torch_random_seed=config.seed,
            fewshot_random_seed=config.seed,
            log_samples=True,
        )
        return [
            {
                "item": name,
                "metrics": {key: value for key, value in result.items() if isinstance(value, (int, float))},
                "version": found["versions"].get(name),
                "shots": found["n-shot"].get(name),
                "model": model.tally.summary(),
                "samples": [_sample(sample) for sample in found.get("samples", {}).get(name, [])],
            }
            for name, result in found["results"].items()
        ]

    def _manager(self, kind: Any) -> Any:
        """Your own tasks alone where they are all that is asked: lm-eval reads thousands of files for its own."""
        if self.task.include is not None:
            own = kind(include_path=self.task.include, include_defaults=False)
            if set(self.task.tasks) <= set(own.all_tasks):
                return own
        return kind(include_path=self.task.include)

    def summary(self, records: Sequence[Record]) -> dict[str, Any]:
        found = {
            record["item"]: {k: v for k, v in record.items() if k not in ("item", "samples")} for record in records
        }
        return {"lm_eval": found}


def _sample(sample: dict[str, Any]) -> dict[str, Any]:
    """What of an lm-eval sample is kept: which document, its hashes, the answers."""
    names = ("doc_id", "target", "filtered_resps", "doc_hash", "prompt_hash", "target_hash")
    return {name: sample[name] for name in names if name in sample}
