"""Tokens with their log-probabilities; those of a prompt, exact for causal families: what lm-eval asks for with `echo`."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from dlm.models.lm import LM
from dlm.training.scoring import own_softmax


@dataclass(frozen=True, kw_only=True)
class Token:
    """A token of an answer, with its log-probability when it was committed."""

    id: int
    text: str
    logprob: float | None
    """None of a prompt's first token."""
    likeliest: Sequence[tuple[str, float]] | None = ()


def piece(lm: LM, token: int) -> str:
    """A token's own text, names of special tokens included."""
    return "" if lm.tokenizer is None else lm.decode([token], skip_special=False)


def prompt_tokens(lm: LM, ids: Sequence[int], top: int) -> list[Token]:
    """Each token of a prompt with its log p given those before it; the first has none."""
    found = [Token(id=ids[0], text=piece(lm, ids[0]), logprob=None, likeliest=None)]
    if len(ids) == 1:
        return found
    batch = torch.tensor([list(ids)], device=lm.device)
    rows = torch.ones_like(batch, dtype=torch.bool)
    rows[:, 0] = False
    with torch.inference_mode():
        network = lm.network
        states = network.attention.states(network.hidden(batch), network.config.shifted_logits)[rows]
        logits = own_softmax(network, network.head(states))  # of the token at each row, from those before it
        log_p = logits.float().log_softmax(-1)
        best = log_p.topk(min(max(top, 1), log_p.shape[-1]), dim=-1)
    for row, token in enumerate(ids[1:]):
        others = zip(best.indices[row].tolist(), best.values[row].tolist(), strict=True)
        likeliest = [(piece(lm, other), value) for other, value in others][:top]
        found.append(Token(id=token, text=piece(lm, token), logprob=float(log_p[row, token]), likeliest=likeliest))
    return found
