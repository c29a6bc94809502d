"""Block diffusion: blocks masked each at its own level, all denoised in one forward."""

from jaxtyping import Float
from torch import Tensor

from dlm.diffusion.noise import Noised
from dlm.models.config import ModelConfig
from dlm.training.batch import Batch
from dlm.training.masking.random import RandomMasking
from dlm.training.masking.view import View
from dlm.training.scoring import two_streams
from dlm.training.sections import ObjectiveConfig


class BlockMasking(RandomMasking):
    """Each block has a noise level t ~ U(0, 1), and is predicted from its unmasked tokens and the clean blocks before
    it (BD3-LM).

    Blocks lie at multiples of `block_length`, as the engine decodes them; where the prompt ends inside one, its tokens
    stay unmasked. Sequences are not truncated: the first blocks of a long one see what a short one would show them.
    """

    work = 2.0, 0.5  # the canvas is the noisy text and the clean one

    def __init__(self, config: ObjectiveConfig, model: ModelConfig, seed: int) -> None:
        super().__init__(config, model, seed)
        self.block_length = config.block_length

    def _view(self, batch: Batch, noised: Noised, weight: Float[Tensor, "b l"]) -> View:
        canvas, positions, spec = two_streams(noised.input_ids, batch.input_ids, self.block_length)
        return View(canvas, batch.input_ids, noised.masked, weight, spec, positions)
