"""Drafts change no text: requests drawn at random, decoded with and without a draft.

`python -m tests.inference.speculative 1000` runs so many; the suite runs a few. With a model's name or folder after the
number its crowds are small ones of that model, computed in C.
"""

import random
import sys
from collections.abc import Sequence as Sized

import numpy as np
import torch

import dlm
from dlm.inference.drafting.drafter import Guess, Plain, Wish
from dlm.inference.drafting.making import Looked
from dlm.kernels.c import binding
from dlm.models.draft import Draft

from .requests import FAMILIES, prompts
from .tiny import tiny_lm

SECOND = {"conv_kernel_size": 2, "conv_group_size": 4, "selector_rank": 5, "selector_top_k": 7}
DRAFTS = ("good", "adversarial", "random", "ngram", "dflash", "dflash2", "sliding", "narrow", "first", "diffusion")


class Told(Plain):
    """Drafts a text that it was told, each token right with probability `right`: 1 is the perfect draft, 0 the worst."""

    name = "told"
    most = 16

    def __init__(self, right: float, vocab_size: int, seed: int = 0) -> None:
        self.right, self.vocab_size, self.random = right, vocab_size, np.random.default_rng(seed)
        self.texts: dict[str, Sized[int]] = {}
        self.proposed = 0

    def propose(self, wishes: Sized[Wish]) -> list[Guess]:
        self.proposed += len(wishes)
        return [Guess(self._tokens(wish), forwards=1) for wish in wishes]

    def _tokens(self, wish: Wish) -> np.ndarray:
        seq = wish.sequence
        text = [*self.texts.get(seq.request_id, ()), *[0] * seq.capacity]
        at = wish.anchor + 1 - seq.canvas.start
        tokens = np.array(text[at : at + wish.count], np.int64)
        wrong = self.random.random(wish.count) >= self.right
        return np.where(wrong, (tokens + 1) % self.vocab_size, tokens)


def target(seed: int) -> dlm.LM:
    """A causal model whose greedy text neither ends at once nor goes round in circles soon."""
    shape = {**FAMILIES["llama"], "vocab_size": 40, "num_hidden_layers": 4, "eos_token_id": 3}
    return tiny_lm(seed, spread=0.5, **shape, **({"qk_norm": True, "tie_word_embeddings": True} if seed % 2 else {}))


def plain(lm, given, **settings):
    return [result.tokens for result in dlm.generate(lm, given, **settings)]


def small(count: int) -> list[list[int]]:
    return [[token % 40 for token in prompt] for prompt in prompts(count)]


def told(lm, given, right: float = 1.0, **settings) -> Told:
    """A drafter that knows what these prompts lead to."""
    drafter = Told(right, lm.config.vocab_size)
    drafter.texts = {str(i): tokens for i, tokens in enumerate(plain(lm, given, **settings))}
    return drafter


def draft_of(kind: str, lm: dlm.LM, seed: int, block_size: int = 17):
    """A draft of that kind for the model."""
    generator, size = torch.Generator().manual_seed(seed), lm.config.vocab_size
    if kind in ("good", "adversarial", "random"):
        return Told({"good": 0.85, "adversarial": 0.0, "random": 1 / 40}[kind], size, seed)
    if kind == "diffusion":
        return tiny_lm(seed, spread=0.5, vocab_size=40, mask_token_id=39)
    if kind == "ngram":
        return "ngram"
    more = {
        "dflash": {},
        "dflash2": SECOND,
        "sliding": {"windows": (4, None), "causal": (True, False)},
        "narrow": {"tokens": range(1, size, 2)},
        "first": {"tokens": range(0, size, 2)},
    }[kind]
    draft = Draft.fresh(lm, num_layers=2, block_size=block_size, generator=generator, mask_token_id=size - 1, **more)
    return Looked(draft) if kind == "first" else draft


def run(seed: int, given: dlm.LM | None = None) -> str:
    """One crowd with a draft and each of its requests without; what differs, or nothing. `given` is a model to use."""
    draw = random.Random(seed)
    lm = target(draw.randrange(4)) if given is None else given
    size = lm.config.vocab_size
    kind = draw.choice(DRAFTS if given is None else DRAFTS[:-1])
    batch = draw.choice((1, 8, 32) if given is None else (1, 2, 4))
    draft = draft_of(kind, lm, seed)
    begin = [draw.randrange(size) for _ in range(draw.choice((0, 0, 9)))]
    prompts = [begin + [draw.randrange(size) for _ in range(1 + draw.randrange(14))] for _ in range(batch)]
    kernels = draw.choice(("auto", "torch")) if given is None else "auto"
    warm = draw.random() < 0.5
    settings = [
        {
            "gen_length": draw.randrange(1, 24 if given is None else 10),
            "temperature": draw.choice((0.7, 1.0)) if warm else 0.0,
            "seed": draw.randrange(100),
            **(draw.choice(({}, {"top_k": 5}, {"top_p": 0.8}, {"top_k": 12, "top_p": 0.9})) if warm else {}),
        }
        for _ in prompts
    ]
    page = draw.choice((3, 8, 32))
    room = {"page_size": page, "kernels": kernels, "max_num_tokens": draw.choice((44, 8192))}
    longest = max(len(prompt) + each["gen_length"] for prompt, each in zip(prompts, settings, strict=True))
    if batch > 1 and draw.random() < 0.5:  # pages are short: requests are parked
        room["num_pages"] = -(-longest // page) * draw.choice((1, 2, 3)) + 1
    else:
        room["num_pages"] = batch * -(-longest // page)
    plain = dlm.Engine(lm, kernels=kernels, num_pages=-(-longest // page), page_size=page)
    alone = [plain.generate([p], **s)[0].tokens for p, s in zip(prompts, settings, strict=True)]
    engine = dlm.Engine(lm, draft=draft, **room)
    if isinstance(draft, Told):
        draft.texts = {str(i): text for i, text in enumerate(alone)}
    length = draw.choice((1, 2, 3, 5, 8, 15, 16, "auto"))
    if kind in ("ngram", "diffusion") and length == 16:
        length = 15
    for i, (prompt, each) in enumerate(zip(prompts, settings, strict=True)):
        drafted = draw.random() < 0.8
        more = {"draft_length": length} if drafted else {"draft": False}
        engine.add_request(prompt, request_id=str(i), **each, **more)  # pyright: ignore[reportArgumentType]
    results = {event.request_id: event for event in engine.stream() if event.last}
    found = [getattr(results[str(i)].result, "tokens", results[str(i)].error) for i in range(batch)]
    wrong = [i for i in range(batch) if found[i] != alone[i]]
    what = f"seed {seed}: {kind}, batch {batch}, draft_length {length}, {room}"
    if wrong:
        return f"{what}: request {wrong[0]} {settings[wrong[0]]}: {found[wrong[0]]} instead of {alone[wrong[0]]}"
    for event in results.values():
        result = event.result
        if result is not None and result.accepted is not None and sum(result.accepted) != len(result.tokens) - 1:
            return f"{what}: {result.accepted} for {len(result.tokens)} tokens"
    pages = engine.stats().pages_used
    return f"{what}: {pages} pages are still used" if pages else ""


def main(count: int, name: str | None = None) -> int:
    """So many crowds; how many went wrong."""
    print(f"C kernels: {binding.unavailable() or 'used'}")
    wrong, given = 0, None if name is None else dlm.load(name)
    for seed in range(count):
        fault = run(seed, given)
        wrong += bool(fault)
        if fault or (seed + 1) % (50 if given is None else 10) == 0:
            print(fault, f"{seed + 1 - wrong} of {seed + 1} runs wrote what no draft writes", flush=True)
    return wrong


if __name__ == "__main__":
    raise SystemExit(min(1, main(int(sys.argv[1]) if len(sys.argv) > 1 else 100, *sys.argv[2:])))
