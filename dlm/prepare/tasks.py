"""Turns samples of data into requests for a teacher: to answer a prompt, or to choose the order of a given answer."""

import json
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy as np
from jaxtyping import Int
from numpy import ndarray

from dlm.data.documents import end_of_text
from dlm.data.samples import Sample
from dlm.inference.canvas import Decision
from dlm.inference.decoding import Decoding, continuations, infillings
from dlm.inference.plan import Plan
from dlm.inference.sequence import Sequence
from dlm.models.fingerprint import weights_digest
from dlm.models.lm import LM
from dlm.prepare.config import TrajectoriesConfig


class Given:
    """A script that imposes a given answer: the rule chooses the positions of a step, this their tokens."""

    def __init__(self, canvas: Int[ndarray, " l"]) -> None:
        self.canvas = canvas

    def leads(self, step: int) -> bool:
        return True

    def decision(self, seq: Sequence, proposed: Decision) -> Decision:
        # Columns that are gaps may point anywhere: nothing is committed there.
        return proposed._replace(token=self.canvas[seq.canvas.columns])


@dataclass(frozen=True)
class Task:
    """One trajectory to record; without `given` the teacher chooses the tokens too."""

    decoding: Decoding
    given: Given | None = None

    @property
    def name(self) -> str:
        return self.decoding.request.request_id


class Tasks:
    """Turns samples into tasks. A task's name is a hash of everything that decides its tokens."""

    def __init__(self, lm: LM, config: TrajectoriesConfig) -> None:
        self.lm, self.config, self.end = lm, config, end_of_text(lm.require_tokenizer())
        s = config.sampler
        self.forced = config.trajectories.responses == "forced"
        self.limit = s.max_gen_length if s.gen_length == "auto" else s.gen_length
        plan = Plan(config=lm.config, block_length=s.block_length)
        self.block_length = plan.length_of_block(None if s.gen_length == "auto" else s.gen_length)
        settings = {
            "weights": weights_digest(lm.network),
            "sampler": s.model_dump(exclude={"num_samples"}),
            "engine": config.engine.model_dump(include={"cache", "refresh_interval", "cache_delay"}),
        }
        self.identity = blake2b(json.dumps(settings, sort_keys=True).encode(), digest_size=16)

    def of(self, sample: Sample) -> list[Task]:
        """One task, or num_samples of them; none where the text ends within its prompt."""
        ids, length = sample["input_ids"].astype(np.int64), self.config.trajectories.prompt_length
        if "prompt_mask" in sample:
            prompt = sample["prompt_mask"]
        elif length == "all":
            return self._free(self._begun(ids[(ids == self.end).cumsum() == 0]))
        else:
            prompt = np.arange(len(ids)) < length
        start = int(prompt.argmin())
        if prompt[start:].any():
            return self._holes(ids, prompt)
        if ids[start] == self.end:
            return []
        if self.forced:
            return self._forced(ids[:start], ids[start:])
        return self._free(ids[:start] if "prompt_mask" in sample else self._begun(ids[:start]))

    def _begun(self, text: Int[ndarray, " p"]) -> Int[ndarray, " q"]:
        return np.array(self.lm.require_tokenizer().begun(text.tolist()), text.dtype)

    def _free(self, prompt: Int[ndarray, " p"]) -> list[Task]:
        found = continuations(self.lm, [prompt.tolist()], self.config.sampler, **self._names(prompt))
        return [Task(decoding) for decoding in found]

    def _forced(self, prompt: Int[ndarray, " p"], answer: Int[ndarray, " a"]) -> list[Task]:
        """A task for the answer in whole blocks: padded if it ends with end-of-text, else cut."""
        ends = np.flatnonzero(answer == self.end)
        answer = answer[: min(self.limit, ends[0] + 1 if len(ends) else self.limit)]
        rest = len(answer) % self.block_length
        if rest and answer[-1] == self.end:
            answer = np.append(answer, np.full(self.block_length - rest, self.end))
        elif rest:
            answer = answer[:-rest]
        if not len(answer):
            return []
        shape = {"gen_length": len(answer), "block_length": self.block_length, "steps": self._steps(len(answer))}
        settings = self.config.sampler.model_copy(update=shape)
        found = continuations(self.lm, [prompt.tolist()], settings, **self._names(prompt, answer))
        tasks = []
        for decoding in found:
            canvas = np.full(decoding.plan.length(decoding.request), self.end)
            canvas[: len(prompt) + len(answer)] = np.concatenate((prompt, answer))
            tasks.append(Task(decoding, Given(canvas)))
        return tasks

    def _holes(self, ids: Int[ndarray, " l"], prompt: ndarray) -> list[Task]:
        """A task whose answer lies between parts of the prompt, as in a Sudoku."""
        canvas = np.where(prompt, ids, self.lm.require_mask_id())
        names = self._names(canvas, ids) if self.forced else self._names(canvas)
        found = infillings(self.lm, [canvas.tolist()], self.config.sampler, **names)
        return [Task(decoding, Given(ids) if self.forced else None) for decoding in found]

    def _steps(self, length: int) -> int | None:
        """The steps for an answer of this length: as many a block as a full answer has."""
        s = self.config.sampler
        if s.steps is None:
            return None
        blocks = length // self.block_length
        return blocks * (s.steps if s.gen_length == "auto" else max(1, s.steps * self.block_length // s.gen_length))

    def _names(self, *parts: ndarray) -> dict[str, Any]:
        name = self.identity.copy()
        name.update(json.dumps([part.tolist() for part in parts]).encode())
        return {"request_ids": [f"trajectory-{name.hexdigest()}"], "where": "[sampler]"}
