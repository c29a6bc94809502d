"""How a mixture chooses its experts."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Routing:
    """A router's rule (DeepSeek-V3, arXiv 2412.19437, section 2.1.2)."""

    chosen: int
    """Experts a row."""
    sigmoid: bool
    """Scores are sigmoids of the logits; else their softmax."""
    normalised: bool
    """Weights are divided by their sum."""
    factor: float = 1.0
    """On the weights."""
    groups: int = 1
    kept_groups: int = 1
    """Only experts of so many groups can be chosen: those whose two best are worth most. All groups: the rule is off."""
