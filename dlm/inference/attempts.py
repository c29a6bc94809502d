"""Holes that are filled until the text passes a check: when to fill them again, and how."""

from dataclasses import replace

from dlm.inference.checks import CHECKS
from dlm.inference.request import Generation
from dlm.inference.sequence import Sequence
from dlm.inference.texts import parted
from dlm.models.lm import LM


def wanting(lm: LM, seq: Sequence) -> bool:
    """Whether a request whose holes are filled is to fill them again."""
    settings = seq.decoding.settings
    if settings.check == "none":
        return False
    # Tokens made text, not the prompt's own text: of a trace that is run again there are tokens only.
    seq.passed = CHECKS[settings.check](*parted(lm, seq.outcome().ids, seq.request.holes))
    return not seq.passed and seq.attempt < settings.attempts


def fill_again(seq: Sequence) -> None:
    """Begin the next attempt. Its steps go on counting, so its random numbers are others than those before."""
    settings = seq.decoding.settings
    seq.begin_again(settings.model_copy(update={"temperature": max(settings.temperature, settings.retry_temperature)}))


def judged(seq: Sequence, result: Generation) -> Generation:
    """The result with what its check says."""
    return result if seq.passed is None else replace(result, attempts=seq.attempt, passed=seq.passed)
