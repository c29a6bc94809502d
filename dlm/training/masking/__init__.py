"""How training corrupts text: the table of all maskings, one small file each. Imports no torch, as configs read it."""

from pkgutil import resolve_name
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from dlm.models.config import ModelConfig
    from dlm.training.masking.view import Masking
    from dlm.training.sections import ObjectiveConfig


class Entry(NamedTuple):
    """Where a masking's class is, and what must be known of it before torch is loaded."""

    place: str
    """module:class"""
    reads: tuple[str, ...] = ()
    """Settings of [objective] that it reads, of those that not every masking reads."""
    attention: Literal["causal", "block_causal"] | None = None
    """What the network's becomes; none: it stays, except that a causal one becomes bidirectional."""
    kind: str = "language"
    """What it trains: a line of `dlm.training.trainable.TRAINABLES`. Other kinds make their masking themselves."""


NOISE = ("t_min", "t_max")
CURRICULUM = ("max_block_length", "min_mask_ratio", "max_mask_ratio", "complementary")
MASKINGS = {
    "random": Entry("dlm.training.masking.random:RandomMasking", (*NOISE, "documents")),
    "complementary": Entry("dlm.training.masking.random:ComplementaryMasking", (*NOISE, "documents")),
    "block": Entry("dlm.training.masking.block:BlockMasking", (*NOISE, "block_length"), "block_causal"),
    "causal": Entry("dlm.training.masking.causal:CausalMasking", ("documents",), "causal"),
    "trajectory": Entry("dlm.training.masking.trajectory:TrajectoryMasking", ("block_length", *CURRICULUM)),
    "draft": Entry("dlm.training.masking.draft:DraftMasking", ("documents",), "causal", kind="draft"),
}
"""objective.masking -> where it is and what it reads. Adding a masking costs its file and one line here."""


def masking_of(config: "ObjectiveConfig", model: "ModelConfig", seed: int) -> "Masking":
    """The masking that the config names, for a network of this shape."""
    return resolve_name(MASKINGS[config.masking].place)(config, model, seed)
