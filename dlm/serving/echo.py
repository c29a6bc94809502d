"""log p of a prompt's own tokens, exact for causal families: what lm-eval asks for with `echo`."""

import torch

from dlm.models.lm import LM
from dlm.serving.choice import Token, piece


def prompt_tokens(lm: LM, ids: list[int], top: int) -> list[tuple[Token, bool]]:
    """Each token of a prompt with its log p given those before it, and whether it has one: the first has none."""
    found = [(Token(id=ids[0], text=piece(lm, ids[0]), logprob=0.0), False)]
    if len(ids) == 1:
        return found
    batch = torch.tensor([ids[:-1]], device=lm.device)
    with torch.inference_mode():
        logits = lm.network.suppress(lm.predict(batch, torch.ones_like(batch, dtype=torch.bool)))
        log_p = logits.float().log_softmax(-1)
        best = log_p.topk(max(top, 1), dim=-1)
    for row, token in enumerate(ids[1:]):
        others = zip(best.indices[row].tolist(), best.values[row].tolist(), strict=True)
        likeliest = [(piece(lm, other), value) for other, value in others][:top]
        found.append(
            (Token(id=token, text=piece(lm, token), logprob=float(log_p[row, token]), likeliest=likeliest), True)
        )
    return found
