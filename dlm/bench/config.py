"""The settings of `dlm-bench`: a section a measurement. Importing it costs no torch."""

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from dlm.inference.config import EngineConfig, ModelSection, RuleName


class Section(BaseModel):
    """One table of the file."""

    model_config = ConfigDict(frozen=True, extra="forbid")


def _whole_blocks(name: str, length: int, block: int | None) -> None:
    if block is not None and length % block:
        raise ValueError(
            f"{name} = {length} is not a multiple of block_length = {block}: "
            f"make it {-(-length // block) * block}, or change block_length"
        )


class InferSection(Section):
    """[infer]: answers to a dataset's questions, by the engine and by plain decoding."""

    dataset: str = Field(
        default="stdlib",
        min_length=1,
        description='JSONL file of question, answer, choices, source; "stdlib": held-out lines of Python.',
    )
    source: str | None = Field(default=None, description="Questions of this source only; none: all.")
    num_samples: int | None = Field(default=None, ge=1, description="Questions at most; none: all (stdlib: 20).")
    skip_sample: int = Field(default=0, ge=0, description="Questions to leave out at the beginning.")
    max_tokens: int = Field(default=128, ge=1, description="Tokens to generate for each question, at most.")
    block_length: int | None = Field(
        default=None, ge=1, description="Tokens denoised together; none: the family's own, or 32."
    )
    denoising_steps: int | None = Field(
        default=None, ge=1, description="Steps a block; none: one for each of its tokens."
    )
    rule: RuleName = Field(default="low_confidence", description="Which masked positions a step commits.")
    threshold: float = Field(default=0.9, ge=0, le=1, description="Rules threshold, hierarchical, credit.")
    temperature: float = Field(default=0.0, ge=0, description="0 takes the most probable token.")
    strategy: Literal["block", "multi_block"] = Field(
        default="block", description="One block after the other, or a few consecutive ones at a time."
    )
    seed: int = Field(default=0, ge=0, description="Of every random number, arrivals included.")
    sampler: dict[str, Any] = Field(default={}, description="Further settings of `dlm.generate`, by their names.")
    skip_vanilla: bool = Field(default=False, description="Leave out plain decoding (same as --skip-vanilla).")
    vanilla: Literal["one_block", "same"] = Field(
        default="one_block",
        description="Plain decoding, uncached, one question after the other: one_block denoises the whole answer with a "
        "step a token, as LLaDA does; same keeps this section's blocks, steps and rule.",
    )
    compared: int = Field(
        default=4, ge=0, description="Questions repeated uncached, and alone, to count equal tokens; 0: none."
    )
    warmup: int = Field(default=1, ge=0, description="Questions answered beforehand, and not counted.")
    shown: int = Field(default=3, ge=0, description="Answers that are printed and stored.")

    @model_validator(mode="after")
    def _fits_together(self) -> "InferSection":
        _whole_blocks("max_tokens", self.max_tokens, self.block_length)
        return self


class LoadSection(Section):
    """[load]: the questions of [infer] as traffic: at random times, and so many at a time."""

    rates: tuple[float, ...] = Field(default=(2.0,), description="Poisson arrivals: requests a second, each a run.")
    in_flight: tuple[int, ...] = Field(default=(1, 4), description="Closed loop: requests under way, each a run.")
    requests: int = Field(
        default=16, ge=1, description="Requests a run; the questions come round again if there are fewer."
    )

    @model_validator(mode="after")
    def _fits_together(self) -> "LoadSection":
        for name, values in (("rates", self.rates), ("in_flight", self.in_flight)):
            if any(value <= 0 for value in values):
                raise ValueError(f"{name} = {list(values)}: each must be above 0")
        if not self.rates and not self.in_flight:
            raise ValueError("rates and in_flight are both empty: give one of them a value")
        return self


class TrainBenchSection(Section):
    """[train]: steps of a training config, their speed and their share of the machine's."""

    config: str = Field(default="sudoku", min_length=1, description="A training config: path or shipped name.")
    steps: int = Field(default=10, ge=1, description="Steps that are timed.")
    warmup: int = Field(default=3, ge=0, description="Steps before, which compile and settle.")
    overrides: dict[str, Any] = Field(
        default={}, description='Dotted keys of that config, and their values here (`"train.batch_size" = 4`).'
    )


class TokenizerBenchSection(Section):
    """[tokenizer]: megabytes a second, in and out."""

    path: str = Field(
        default="pico", min_length=1, description="A tokenizer's or a model's folder, a bundled model, a hub id."
    )
    megabytes: float = Field(default=2.0, gt=0, description="Text to encode, at most.")
    repeats: int = Field(default=3, ge=1, description="Times; the fastest counts.")
    file: Path | None = Field(default=None, description="A UTF-8 text file; none: the standard library.")


class ServeBenchSection(Section):
    """[serve]: traffic over HTTP, to `dlm-serve` or any server of OpenAI's protocol."""

    url: str = Field(default="http://127.0.0.1:8000", min_length=1, description="The server's address.")
    model: str | None = Field(default=None, min_length=1, description="The model's id; none: the first one served.")
    rates: tuple[float, ...] = Field(default=(1.0, 4.0), description="Poisson arrivals: requests a second, each a run.")
    in_flight: tuple[int, ...] = Field(default=(1, 8), description="Closed loop: requests under way, each a run.")
    requests: int = Field(default=32, ge=1, le=100_000, description="Requests a run.")
    max_tokens: int = Field(default=64, ge=1, description="Tokens of an answer, at most.")
    temperature: float = Field(default=0.0, ge=0, description="0 takes the most probable token.")
    chat: bool = Field(default=False, description="Ask /v1/chat/completions.")
    prompts: tuple[str, ...] = Field(
        default=("import os\n", "def area(r):\n", "class File:\n"), min_length=1, description="Taken in turn."
    )
    sampler: dict[str, Any] = Field(default={}, description="Further fields of the request, by their names.")
    first_within: float = Field(default=1.0, gt=0, description="Goodput: seconds to the first block, at most.")
    whole_within: float = Field(default=10.0, gt=0, description="Goodput: seconds to the end, at most.")
    warmup: int = Field(default=2, ge=0, description="Requests beforehand that are not counted.")
    seed: int = Field(default=0, ge=0, description="Of arrivals; request i has the seed `seed` + i.")
    plot: Path | None = Field(default=Path("bench-serve.png"), description="Latencies over the load; none: no plot.")

    @model_validator(mode="after")
    def _fits_together(self) -> "ServeBenchSection":
        for name, values in (("rates", self.rates), ("in_flight", self.in_flight)):
            if any(value <= 0 for value in values):
                raise ValueError(f"{name} = {list(values)}: each must be above 0")
        if not self.rates and not self.in_flight:
            raise ValueError("rates and in_flight are both empty: give one of them a value")
        return self


class OutputSection(Section):
    """[output]: where results go beside the tables."""

    file: Path | None = Field(default=Path("bench.json"), description="JSON of everything measured; none: no file.")
    markdown: bool = Field(default=False, description="Write the tables as Markdown beside the JSON.")


class BenchConfig(Section):
    """Everything `dlm-bench` reads. A measurement whose section is absent is left out, unless asked for by name."""

    model: ModelSection = Field(default=ModelSection(), description="The model of [infer] and [load].")
    engine: EngineConfig = Field(default=EngineConfig(), description="The engine that is measured.")
    infer: InferSection | None = Field(default=None, description="Answers to questions.")
    load: LoadSection | None = Field(default=None, description="The same as traffic.")
    train: TrainBenchSection | None = Field(default=None, description="Training steps.")
    tokenizer: TokenizerBenchSection | None = Field(default=None, description="Text to tokens and back.")
    serve: ServeBenchSection | None = Field(default=None, description="Traffic over HTTP.")
    output: OutputSection = Field(default=OutputSection(), description="Where results go.")
    threads: int | None = Field(default=None, ge=1, le=1024, description="CPU threads; none: torch's choice.")
