"""What a held-out split costs, per token and per byte. Trains nothing; the estimators are `dlm.diffusion.bound`'s."""

import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, cast

from dlm.data.config import DataConfig
from dlm.errors import UserError

if TYPE_CHECKING:
    from dlm.models.lm import LM


@dataclass(frozen=True, kw_only=True)
class BoundResult:
    """An upper bound on how much the model needs for the split, with the standard error of its Monte Carlo draws.

    For a causal network it is the likelihood itself, without an error.
    Each sequence is scored alone, from nothing before it, so text that is cut into sequences pays for each beginning.
    End-of-text counts as a token and as no byte.
    """

    sequences: int
    length: int
    draws: int
    tokens: int
    bytes: int | None
    nats_per_token: float
    nats_error: float | None
    """None of one draw, as `bits_error`."""
    perplexity: float
    bits_per_byte: float | None
    bits_error: float | None
    seconds: float

    def row(self) -> dict[str, Any]:
        """One line of a table."""
        from dlm.diffusion.bound import with_error

        bits = None if self.bits_per_byte is None else with_error(self.bits_per_byte, self.bits_error)
        return {
            "bits": bits,
            "nats": with_error(self.nats_per_token, self.nats_error),
            "perplexity": round(self.perplexity, 2),
            **{name: getattr(self, name) for name in ("sequences", "length", "tokens", "bytes", "draws")},
        }

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)


HEADINGS = {
    "bits": "bits a byte ≤",
    "nats": "nats a token ≤",
    "perplexity": "perplexity a token ≤",
    "sequences": "sequences",
    "length": "tokens each",
    "tokens": "tokens scored",
    "bytes": "bytes",
    "draws": "draws",
}


def measure_bound(
    lm: "LM",
    data: DataConfig,
    *,
    length: int,
    sequences: int = 512,
    draws: int = 4,
    batch_size: int = 16,
    seed: int = 0,
) -> BoundResult:
    """The bound over `sequences` of the held-out split of `data`, or over all of it where it has fewer."""
    from dlm.models.required import require_model
    from dlm.training.scoring import TokenCosts
    from dlm.training.validate import HeldOut

    require_model(lm, "measure_bound()")
    for name, value in (("sequences", sequences), ("draws", draws)):
        if value < 1:
            raise UserError(f"{name} = {value} must be at least 1")
    started = time.perf_counter()
    tokenizer = lm.tokenizer if data.source == "sudoku" else lm.require_tokenizer()
    held = HeldOut.of(data, tokenizer, length, sequences, batch_size, seed)
    if held is None:
        raise UserError(f'the held-out split of data.source = "{data.source}" is empty: raise data.heldout_fraction')
    found = held.bound(cast("TokenCosts", lm) if lm.refuses else TokenCosts(lm.network), draws, seed)
    bits = found.bits_per_byte
    return BoundResult(
        sequences=held.sequences,
        length=held.length,
        draws=1 if lm.network.attention.kind == "causal" else draws,
        tokens=found.tokens,
        bytes=found.bytes,
        nats_per_token=found.per_token[0],
        nats_error=found.per_token[1],
        perplexity=found.perplexity,
        bits_per_byte=None if bits is None else bits[0],
        bits_error=None if bits is None else bits[1],
        seconds=time.perf_counter() - started,
    )
