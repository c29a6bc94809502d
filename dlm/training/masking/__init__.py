"""The table of maskings, the ways in which training corrupts text; each is one small file. Imports no torch."""

from pkgutil import resolve_name
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from dlm.models.config import ModelConfig
    from dlm.training.masking.view import Masking
    from dlm.training.sections import ObjectiveConfig


class Entry(NamedTuple):
    """A masking's class by name, and what configs need to know without loading torch."""

    place: str
    """module:class"""
    reads: tuple[str, ...] = ()
    """Settings of [objective] that only some maskings read, and this one does."""
    attention: Literal["causal", "block_causal"] | None = None
    """The attention that it trains; None keeps the network's, but a causal one becomes bidirectional (and others, where
    objective.attention says so)."""
    kind: str = "language"
    """The kind of model that it trains, a key of `dlm.training.trainable.TRAINABLES`."""


NOISE, WHOLE = ("t_min", "t_max"), ("documents", "attention")
SPANS = ("span_share", "span_length", "span_level", "span_edges")
CURRICULUM = ("max_block_length", "min_mask_ratio", "max_mask_ratio", "complementary")
MASKINGS = {
    "random": Entry("dlm.training.masking.random:RandomMasking", (*NOISE, *WHOLE)),
    "complementary": Entry("dlm.training.masking.random:ComplementaryMasking", (*NOISE, *WHOLE)),
    "spans": Entry("dlm.training.masking.spans:SpanMasking", (*NOISE, *WHOLE, *SPANS)),
    "block": Entry("dlm.training.masking.block:BlockMasking", (*NOISE, "block_length"), "block_causal"),
    "causal": Entry("dlm.training.masking.causal:CausalMasking", ("documents",), "causal"),
    "trajectory": Entry(
        "dlm.training.masking.trajectory:TrajectoryMasking", ("block_length", "attention", *CURRICULUM)
    ),
    "draft": Entry("dlm.training.masking.draft:DraftMasking", ("documents",), "causal", kind="draft"),
}
"""objective.masking -> its entry. To add a masking: its file, and one line here."""


def masking_of(config: "ObjectiveConfig", model: "ModelConfig", seed: int) -> "Masking":
    """The masking that the config names, for a network of this shape."""
    return resolve_name(MASKINGS[config.masking].place)(config, model, seed)
