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


def credit(lm: LM, prompt: list[int], gen_length: int, block_length: int, threshold: float) -> list[int]:
    """dInfer's credit decoding (arXiv 2510.08666): favourites of earlier steps are believed sooner."""
    mask, vocabulary = lm.config.mask_token_id, range(lm.config.vocab_size)
    canvas = [*prompt, *[mask] * gen_length]
    for start in range(len(prompt), len(canvas), block_length):
        block = range(start, start + block_length)
        earned = {position: np.zeros(len(vocabulary)) for position in block}
        while any(canvas[position] == mask for position in block):
            rows, found = logits_of(lm, canvas), []
            for position in block:
                if canvas[position] == mask:
                    favourite = max((t for t in vocabulary if t != mask), key=lambda t, p=position: rows[p][t])
                    earned[position] *= 0.8
                    earned[position][favourite] += softmax(rows[position])[favourite] ** 0.2
                    row = rows[position] + 0.7 * np.log1p(earned[position])
                    token = max((t for t in vocabulary if t != mask), key=lambda t, row=row: row[t])
                    found.append((-softmax(row)[token], position, token))
            for confidence, position, token in found:
                if -confidence >= threshold or (confidence, position, token) == min(found):
                    canvas[position] = token
    return canvas[len(prompt) :]


def left_to_right(lm: LM, prompt: list[int], gen_length: int) -> list[int]:
    """Greedy autoregression."""
    canvas = list(prompt)
    for _ in range(gen_length):
        canvas.append(int(logits_of(lm, canvas)[-1].argmax()))
    return canvas[len(prompt) :]


def fast_dllm(
    lm: LM, canvas: list[int], blocks: list[list[int]], steps: int, dual: bool, threshold: float | None
) -> tuple[list[int], int]:
    """Fast-dLLM's prefix and dual cache (algorithm 1): a full pass at each block's first step, the rest on its keys.

    `blocks` are the positions of `canvas` that are denoised together, each in `steps` steps: of a continuation or, with
    text on both sides, of holes. Keys and values lie in one array over the canvas; attention is a softmax written out.
    Returns the filled canvas and the number of forwards.
    """
    mask, network, canvas = lm.config.mask_token_id, lm.network, list(canvas)
    heads, groups = lm.config.num_attention_heads, lm.config.num_key_value_heads
    frequency = 1 / lm.config.rope_theta ** (np.arange(0, lm.config.head_dim, 2) / lm.config.head_dim)
    cache: list[tuple[np.ndarray, np.ndarray]] = [(np.zeros(0), np.zeros(0))] * len(network.layers)

    def rotated(x: np.ndarray, positions: list[int]) -> np.ndarray:
        angle = np.asarray(positions)[:, None] * frequency
        turn = np.exp(1j * angle)[:, None]
        pair = (x[..., : x.shape[-1] // 2] + 1j * x[..., x.shape[-1] // 2 :]) * turn
        return np.concatenate((pair.real, pair.imag), -1)

    def forward(positions: list[int], written: list[int]) -> np.ndarray:
        """Logits at `positions`; only the keys of those in `written` replace the ones in the cache."""

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            queries, keys, values = (x[0].double().numpy() for x in (q, k, v))
            queries, keys = rotated(queries, positions), rotated(keys, positions)
            if len(positions) == len(canvas):
                cache[layer] = keys, values
            else:
                rows = [positions.index(position) for position in written]
                cache[layer][0][written], cache[layer][1][written] = keys[rows], values[rows]
            keys, values = (np.repeat(x, heads // groups, 1) for x in cache[layer])
            score = np.einsum("qhe,khe->hqk", queries, keys) / np.sqrt(keys.shape[-1])
            weight = np.exp(score - score.max(-1, keepdims=True))
            out = np.einsum("hqk,khe->qhe", weight / weight.sum(-1, keepdims=True), values)
            return torch.tensor(out, dtype=torch.float32)[None]

        with torch.no_grad():
            ids = torch.tensor([[canvas[position] for position in positions]])
            hidden = network.hidden(ids, torch.tensor([positions]), attend=attend)
            return network.head(hidden)[0].double().numpy()

    forwards, shift = 0, int(lm.config.shifted_logits)
    for block in blocks:
        step = 0
        while any(canvas[position] == mask for position in block):
            written = block if dual else list(range(block[0], len(canvas)))
            # Shifted families read a token's logits one row earlier; that row keeps the keys it had.
            partly = sorted({*written, *(position - shift for position in written)})
            positions = partly if step else list(range(len(canvas)))
            logits = forward(positions, written)
            forwards += 1
            found = []
            for position in block:
                if canvas[position] == mask:
                    row = logits[positions.index(position - shift)]
                    token = max((t for t in range(len(row)) if t != mask), key=lambda t, row=row: row[t])
                    found.append((-softmax(row)[token], position, token))
            found.sort()
            count = len(block) // steps + (step < len(block) % steps)
            for rank, (confidence, position, token) in enumerate(found):
                if (rank < count) if threshold is None else (rank == 0 or -confidence >= threshold):
                    canvas[position] = token
            step += 1
    return canvas, forwards
