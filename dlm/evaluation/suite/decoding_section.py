"""[[decoding]]: how tokens are decided. Importing it costs no torch."""

from typing import Any

from pydantic import Field, model_validator

from dlm.inference.config import Cache, SamplerConfig
from dlm.inference.readers import SAMPLER_READERS
from dlm.reading import judged, unread


class DecodingSection(SamplerConfig):
    """[[decoding]]: how tokens are decided, by the names of `dlm.generate`; what is left out is the task's or the default."""

    name: str | None = Field(default=None, min_length=1, description="What tables call it; none: its settings.")
    cache: Cache = Field(default="auto", description="The engine's cache.")
    draft: str = Field(
        default="none",
        min_length=1,
        description='What guesses tokens that the model then checks: "none", "ngram", "self" (diffusion models), or a '
        "draft's or a model's folder or hub id. Holes take none.",
    )
    tokens_per_step: int | None = Field(
        default=None, ge=1, description="In place of steps: so many tokens of each item are decided a step."
    )

    @property
    def given(self) -> dict[str, Any]:
        """The sampler's settings that were written down."""
        names = [name for name in SamplerConfig.model_fields if name in self.model_fields_set]
        return {name: getattr(self, name) for name in names}

    @property
    def label(self) -> str:
        """What tables call it; "as recommended" where no setting is given, for then each model's own advice holds."""
        if self.name is not None:
            return self.name
        given = self.given
        given.pop("rule", None)
        words = [self.way["rule"]]
        words += [f"{key}={value:g}" if isinstance(value, float) else f"{key}={value}" for key, value in given.items()]
        words += [f"{self.tokens_per_step}/step"] if self.tokens_per_step else []
        words += [
            f"{name}={value}"
            for name, value in self.way.items()
            if name in ("cache", "draft") and value not in ("auto", "none")
        ]
        return " ".join(words)

    @property
    def way(self) -> dict[str, str]:
        """What kind of decoding this is, apart from the rule's settings."""
        blocks = "none" if self.block_length is None else str(self.block_length)
        named = bool(self.given) or self.tokens_per_step is not None
        found = {"rule": self.rule if named else "as recommended"}
        return found | {name: str(getattr(self, name)) for name in ("strategy", "cache", "draft")} | {"blocks": blocks}

    @model_validator(mode="after")
    def _fits_together(self) -> "DecodingSection":
        """What is generated is the task's, and made whole blocks, unless it stands here."""
        if "gen_length" in self.model_fields_set:
            SamplerConfig.model_validate(self.given)
        return self

    @model_validator(mode="after")
    def _reads_all(self) -> "DecodingSection":
        if (problem := unread(self, SAMPLER_READERS, judged(self, SAMPLER_READERS))) is not None:
            raise ValueError(problem)
        for name in ("draft_length", "verify"):
            if self.draft == "none" and name in self.model_fields_set:
                raise ValueError(f"{name} = {getattr(self, name)} is only read with a draft, and there is none")
        if self.tokens_per_step is not None and "steps" in self.model_fields_set:
            raise ValueError(f"steps = {self.steps} and tokens_per_step = {self.tokens_per_step}: give one of them")
        return self
