"""Tasks that are measured in one piece: the bound of held-out text, and lm-eval's tasks."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from dlm.errors import UserError
from dlm.evaluation.suite.decoding_section import DecodingSection
from dlm.evaluation.suite.task_section import TaskSection
from dlm.evaluation.suite.trial import Record, Setting, Whole, data_digest, heldout, heldout_digest

if TYPE_CHECKING:
    from dlm.models.lm import LM

SEQUENCES = 64
"""Without a limit."""


class Bound(Whole):
    """What held-out text costs, in bits a byte; an item is a sequence of `length` tokens."""

    decodes, measure = False, "bits_per_byte"

    def __init__(self, lm: "LM", task: TaskSection, setting: Setting) -> None:
        super().__init__(lm, task, setting)
        self.names = ["all"]

    def truth(self, number: int) -> Any:
        return heldout_digest(heldout(self.task)), self.setting.limit(self.task)

    def measured(self, way: DecodingSection) -> list[Record]:
        """The one record of it all."""
        from dlm.evaluation.bound import measure_bound

        length = min(self.task.length, self.lm.config.context_length)
        count = self.setting.limit(self.task) or SEQUENCES
        found = measure_bound(
            self.lm, heldout(self.task), length=length, sequences=count, draws=self.task.draws, seed=self.setting.seed
        ).to_dict()
        found.pop("seconds")
        return [{"item": "all", **found}]

    def summary(self, records: Sequence[Record]) -> dict[str, Any]:
        return {name: value for name, value in records[0].items() if name != "item"}


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
        """lm-eval's index of tasks. It holds only those of `include` if they suffice: lm-eval's own are thousands of files."""
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
