"""The samplers as the papers tell them, in plain loops over one request. Shares no code with the package's sampler."""

import numpy as np
import torch

from dlm.models import LM


def logits_of(lm: LM, canvas: list[int]) -> np.ndarray:
    with torch.no_grad():
        return lm.network(torch.tensor([canvas]))[0].double().numpy()


def softmax(row: np.ndarray) -> np.ndarray:
    e = np.exp(row - row.max())
    return e / e.sum()


def llada(
    lm: LM, prompt: list[int], gen_length: int, block_length: int, steps: int, cfg_scale: float = 0.0
) -> list[int]:
    """Semi-autoregressive low-confidence remasking (LLaDA, algorithm 5 and section B.4), with guidance (section B.3)."""
    mask = lm.config.mask_token_id
    canvas = [*prompt, *[mask] * gen_length]
    steps_a_block = steps // (gen_length // block_length)
    for start in range(len(prompt), len(canvas), block_length):
        block = range(start, start + block_length)
        for step in range(steps_a_block):
            count = block_length // steps_a_block + (step < block_length % steps_a_block)
            rows = logits_of(lm, canvas)
            if cfg_scale:
                blind = logits_of(lm, [mask] * len(prompt) + canvas[len(prompt) :])
                rows = blind + (cfg_scale + 1) * (rows - blind)
            found = []
            for position in block:
                if canvas[position] == mask:
                    token = max((t for t in range(len(rows[position])) if t != mask), key=lambda t: rows[position][t])
                    found.append((-softmax(rows[position])[token], position, token))
            for _, position, token in sorted(found)[:count]:
                canvas[position] = token
    return canvas[len(prompt) :]


def block_diffusion(lm: LM, prompt: list[int], gen_length: int, block_length: int, threshold: float) -> list[int]:
    """Blocks at absolute multiples, confidence threshold, the whole canvas under a block-causal mask (SDAR)."""
    mask = lm.config.mask_token_id
    end = -(-(len(prompt) + gen_length) // block_length) * block_length
    canvas = prompt + [mask] * (end - len(prompt))
    for first in range(len(prompt) // block_length * block_length, end, block_length):
        while mask in canvas[first : first + block_length]:
            rows = logits_of(lm, canvas)
            found = []
            for position in range(first, first + block_length):
                if canvas[position] == mask:
                    row = rows[position].copy()
                    p = softmax(row)
                    row[mask] = -np.inf
                    found.append((p[row.argmax()], -position, row.argmax()))
            best = max(found)
            for confidence, place, token in found:
                if confidence >= threshold or (confidence, place, token) == best:
                    canvas[-place] = int(token)
    return canvas[len(prompt) : len(prompt) + gen_length]


def left_to_right(lm: LM, prompt: list[int], gen_length: int) -> list[int]:
    """Greedy autoregression."""
    canvas = list(prompt)
    for _ in range(gen_length):
        canvas.append(int(logits_of(lm, canvas)[-1].argmax()))
    return canvas[len(prompt) :]
