"""How training corrupts text: one small file for each value of `objective.masking`. Knows no optimiser and no loop."""

from dlm.training.masking.block import BlockMasking
from dlm.training.masking.causal import CausalMasking
from dlm.training.masking.random import ComplementaryMasking, RandomMasking
from dlm.training.masking.trajectory import TrajectoryMasking
from dlm.training.masking.view import Masking, View

MASKINGS = {
    "random": RandomMasking,
    "complementary": ComplementaryMasking,
    "block": BlockMasking,
    "causal": CausalMasking,
    "trajectory": TrajectoryMasking,
}

__all__ = ["MASKINGS", "Masking", "View"]
