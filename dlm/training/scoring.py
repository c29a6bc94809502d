"""The cost of text under a network, in nats, with few logits in memory at a time."""

from collections.abc import Callable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from dlm.diffusion.bound import Nats, likelihood, likelihood_bound
from dlm.diffusion.loss import token_losses
from dlm.errors import UserError
from dlm.models.attention import AttentionSpec
from dlm.models.transformer import Transformer

LOGITS_AT_ONCE = 2**26
"""256 MiB in fp32; with log p and gradients three to four times that."""


def in_slices(
    score: Callable[[Tensor, Tensor], Tensor], vocab_size: int, states: Float[Tensor, "n d"], targets: Int[Tensor, " n"]
) -> Float[Tensor, "n ..."]:
    """`score(states, targets)`, which computes logits, applied to a few rows at a time.

    With several slices and gradients recorded, the backward pass computes each slice's logits again instead of keeping
    them, so the logits of a whole batch are never in memory at once.
    """
    most = max(1, LOGITS_AT_ONCE // vocab_size)
    if len(states) <= most:
        return score(states, targets)
    parts = zip(states.split(most), targets.split(most), strict=True)
    if not torch.is_grad_enabled():
        return torch.cat([score(*part) for part in parts])
    # Autocast would cast the head's weights once for all slices, and add up their gradients in bf16.
    kind = states.device.type
    with torch.autocast(kind, enabled=torch.is_autocast_enabled(kind), cache_enabled=False):
        return torch.cat([checkpoint(score, *part, use_reentrant=False, preserve_rng_state=False) for part in parts])


def sequence_nats(
    network: Transformer,
    input_ids: Int[Tensor, "b l"],
    *,
    answer: Bool[Tensor, "b l"] | None = None,
    index: Int[Tensor, " b"] | None = None,
    samples: int = 1,
    seed: int = 0,
    valid: Bool[Tensor, "b l"] | None = None,
    first: int | Int[Tensor, " b"] | None = None,
) -> Float[Tensor, "b s"]:
    """The cost in nats of each sequence's `answer` given the rest, as the network's own attention would generate it.

    Bidirectional and block-causal networks: `samples` draws of the bound. Causal ones: the likelihood itself, once.
    All three count the same tokens, the first one included, so their bits a byte compare.

    `valid` is False on padding behind a sequence. `first` is what stands before each sequence of a causal network:
    end-of-text unless given.
    """
    kind, size = network.attention.kind, network.attention.block_length
    if kind == "causal":
        why = "a causal model predicts the first token from end-of-text"
        before = need_token(network, "eos_token_id", why) if first is None else first

        def moved(shown: Tensor, predicted: Tensor) -> Tensor:
            return _nats(network, network.hidden(shown)[predicted], input_ids[predicted])

        return likelihood(moved, input_ids, before, answer=answer)

    mask_id = need_token(network, "mask_token_id", "a diffusion model predicts masked tokens")
    nats = masked_nats(network, input_ids, valid)
    return likelihood_bound(
        nats, input_ids, mask_id, answer=answer, index=index, samples=samples, seed=seed, block_length=size
    )


def masked_nats(network: Transformer, clean: Int[Tensor, "b l"], valid: Bool[Tensor, "b l"] | None = None) -> Nats:
    """A function that gives the cost of masked tokens of `clean`; blocks see the clean blocks before them."""
    kind, size = network.attention.kind, network.attention.block_length

    def nats(shown: Tensor, predicted: Tensor) -> Tensor:
        positions, seen, spec = None, valid, network.attention
        if kind == "block_causal":
            shown, positions, spec = two_streams(shown, clean, size)
            seen = None if valid is None else valid.repeat(1, 2)
        hidden = network.hidden(shown, positions, seen, attention=spec)
        states = spec.states(hidden, network.config.shifted_logits)
        return _nats(network, states[predicted], clean[predicted])

    return nats


class TokenCosts:
    """A Transformer with the methods that `HeldOut.bound` calls."""

    def __init__(self, network: Transformer) -> None:
        self.network = network

    @property
    def exact(self) -> bool:
        """Whether the costs are the likelihood itself, as a causal network's are."""
        return self.network.attention.kind == "causal"

    def nats(self, ids: Tensor, answer: Tensor, index: Tensor, draws: int, seed: int) -> Tensor:
        """See `sequence_nats`; tensors may lie on any device."""
        device = self.network.embed.weight.device
        ids, answer, index = ids.to(device), answer.to(device), index.to(device)
        return sequence_nats(self.network, ids, answer=answer, index=index, samples=draws, seed=seed)


def two_streams(
    noisy: Int[Tensor, "b l"], clean: Int[Tensor, "b l"], block_length: int | None
) -> tuple[Int[Tensor, "b m"], Int[Tensor, "b m"], AttentionSpec]:
    """Canvas, positions and attention of one forward in which every noisy block sees the clean blocks before it."""
    both = torch.cat((noisy, clean), dim=1)
    position = torch.arange(clean.shape[1], device=clean.device).repeat(2).expand_as(both)
    return both, position, AttentionSpec("two_stream", block_length)


def need_token(network: Transformer, name: str, why: str) -> int:
    """The id of a special token, or an error that says what to do."""
    token = getattr(network.config, name)
    if token is None:
        raise UserError(f'{why}, and this one names none: set "{name}" in its config.json, or model.{name} in training')
    return token


def own_softmax(network: Transformer, logits: Float[Tensor, "n v"]) -> Float[Tensor, "n v"]:
    """The logits that the family's own likelihoods normalise over; may overwrite them.

    Another project's causal checkpoint knows no mask, whatever stands in its tokenizer: all tokens count.
    """
    foreign = network.attention.kind == "causal" and network.config.model_type != "dlm"
    return logits if foreign else network.suppress(logits)


def _nats(network: Transformer, states: Float[Tensor, "n d"], targets: Int[Tensor, " n"]) -> Float[Tensor, " n"]:
    def score(states: Tensor, targets: Tensor) -> Tensor:
        return token_losses(own_softmax(network, network.head(states).float()), targets)

    return in_slices(score, network.config.vocab_size, states, targets)
