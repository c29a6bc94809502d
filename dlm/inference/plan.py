"""In which order a request's positions are denoised: its blocks. Knows nothing of networks or decode rules."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from dlm.errors import UserError
from dlm.inference.request import Request
from dlm.models.config import ModelConfig

BLOCK_LENGTH, STEPS = 32, 128


@dataclass(frozen=True)
class Block:
    """Positions that are denoised together."""

    positions: Sequence[int]
    length: int
    """Positions from 0 that the network is shown meanwhile."""
    steps: int


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How a batch of requests is cut into blocks; `None` leaves a number to the family and the request.

    Bidirectional families: blocks start at the prompt's end, and the network sees every mask that is to be filled.
    Block-causal families: blocks lie at multiples of `block_length`, which is also the block of their attention, so
    the first may begin with the prompt's tail and the last may reach past `gen_length`; what it writes there is not
    returned. Causal families: one token after the other.
    """

    config: ModelConfig
    block_length: int | None = None
    steps: int | None = None
    open_ended: bool = False

    @property
    def step_by_token(self) -> bool:
        return self.config.attention == "causal"

    @property
    def aligned(self) -> bool:
        return self.config.attention == "block_causal"

    def length_of_block(self, gen_length: int | None) -> int:
        """As given; else the family's own, or 32 where that fits into `gen_length`."""
        if self.step_by_token:
            return 1
        if self.block_length is not None:
            return self.block_length
        if self.config.block_length is not None and self.aligned:
            return self.config.block_length
        return BLOCK_LENGTH if gen_length is None else max(1, min(BLOCK_LENGTH, gen_length))

    def whole_blocks(self, gen_length: int) -> int:
        """`gen_length`, rounded up to whole blocks."""
        block = self.length_of_block(gen_length)
        return -(-gen_length // block) * block

    def blocks(self, request: Request) -> Iterator[Block]:
        """The request's blocks in order; the sampler may stop before the last."""
        if request.holes:
            yield from self._holes(request)
            return
        start, end = len(request.ids), len(request.ids) + request.gen_length
        size = self.length_of_block(None if self.open_ended else request.gen_length)
        steps = self._steps(request.gen_length, size)
        if self.aligned:
            for first in range(start // size * size, end, size):
                yield Block(range(max(first, start), first + size), first + size, steps)
            return
        for first in range(start, end, size):
            after = min(first + size, end)
            grows = self.open_ended or self.step_by_token
            yield Block(range(first, after), after if grows else end, steps)

    def length(self, request: Request) -> int:
        """Positions a request may come to need."""
        end = len(request.ids) + request.gen_length
        if not self.aligned or request.holes:
            return end
        size = self.length_of_block(None if self.open_ended else request.gen_length)
        return -(-end // size) * size

    def require_whole_blocks(self, gen_length: int, size: int) -> None:
        """Refuse a length that is no multiple of its blocks."""
        if gen_length % size:
            raise UserError(
                f"gen_length = {gen_length} is not a multiple of block_length = {size}: "
                f"make it {-(-gen_length // size) * size}, or change block_length"
            )

    def _steps(self, gen_length: int, size: int) -> int:
        """Steps of one block: `steps` spread over the blocks, or `steps` itself where their number is open."""
        if self.step_by_token:
            return 1
        if self.open_ended:
            return STEPS if self.steps is None else self.steps
        self.require_whole_blocks(gen_length, size)
        blocks = gen_length // size
        if self.steps is None:
            return max(1, STEPS // blocks)
        if self.steps % blocks:
            near = max(1, round(self.steps / blocks)) * blocks
            raise UserError(
                f"steps = {self.steps} is not a multiple of the {blocks} blocks "
                f"(gen_length = {gen_length} / block_length = {size}): make it {near}, or change block_length"
            )
        return self.steps // blocks

    def _holes(self, request: Request) -> Iterator[Block]:
        """All holes together, or `block_length` of their positions at a time; steps are shared out among the blocks."""
        positions = [position for hole in request.holes for position in hole]
        size = len(positions) if self.block_length is None else self.block_length
        starts = range(0, len(positions), size)
        steps = max(1, (STEPS if self.steps is None else self.steps) // len(starts))
        for first in starts:
            yield Block(positions[first : first + size], len(request.ids), steps)
