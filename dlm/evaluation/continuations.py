"""How a model continues held-out text: how often it loops, and how likely a judge finds it, beside the real continuation.

A continuation loops when some 4-gram of its tokens occurs more than three times. Perplexity alone rewards loops and
entropy alone rewards noise, so both stand side by side, with those of the real text and of its tokens shuffled.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from dlm.data.config import DataConfig
from dlm.errors import UserError
from dlm.evaluation.rate import Rate

if TYPE_CHECKING:
    from dlm.inference.request import Generation
    from dlm.models.lm import LM

GRAM, MOST = 4, 3
"""A loop: a run of GRAM tokens more than MOST times."""
HEADINGS = {
    "text": "continuation",
    "settings": "settings",
    "loops": "loops (95 %)",
    "perplexity": "perplexity a token",
    "entropy": "entropy, bits",
    "tpf": "TPF",
    "texts": "texts",
}


@dataclass(frozen=True, kw_only=True)
class Continuation:
    """A prompt cut from a held-out file at a line's start, and the tokens that really follow it there."""

    name: str
    prompt: str
    real: list[int]


@dataclass(frozen=True, kw_only=True)
class ContinuationResult:
    """What one set of continuations is like."""

    text: str
    """Whose: a model's name, "real" or "shuffled"."""
    settings: str
    loops: Rate
    perplexity: float
    """exp of the judge's nats a token, given the prompt."""
    entropy: float
    """Bits of a continuation's own distribution of tokens; the mean over continuations."""
    tpf: float | None
    texts: int

    def row(self) -> dict[str, Any]:
        """One line of a table."""
        return {**asdict(self), "loops": str(self.loops), "perplexity": round(self.perplexity, 1)}

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {**asdict(self), "loops": self.loops.to_dict()}


def heldout_prompts(
    data: DataConfig, lm: "LM", count: int = 100, seed: int = 0, *, context: int = 400, tokens: int = 64
) -> list[Continuation]:
    """`count` places drawn evenly from all lines of the held-out files that have `context` characters before them and
    `tokens` tokens from there on; the prompt is the whole lines among those characters."""
    from dlm.data.source import rows_of

    tokenizer, places = lm.require_tokenizer(), []
    for row in rows_of(data, "heldout"):
        text, start = row.value["text"], 0
        for number, line in enumerate(text.split("\n"), start=1):
            if line.strip() and start >= context and len(text) - start >= 8 * tokens:
                places.append((f"{row.key}:{number}", text, start))
            start += len(line) + 1
    if not places:
        raise UserError(
            f"the held-out split of data.source = {data.source!r} has no line with {context} characters before"
        )
    found = []
    for i in np.random.default_rng(seed).permutation(len(places))[:count]:
        name, text, start = places[i]
        begin = text.find("\n", start - context) + 1
        real = tokenizer.encode(text[start : start + 16 * tokens], special=False)[:tokens]
        found.append(Continuation(name=name, prompt=text[begin:start], real=real))
    return found


def loops(tokens: Sequence[int], gram: int = GRAM, most: int = MOST) -> bool:
    """Whether some run of `gram` tokens occurs more than `most` times."""
    runs = Counter(tuple(tokens[i : i + gram]) for i in range(len(tokens) - gram + 1))
    return max(runs.values(), default=0) > most


def entropy(tokens: Sequence[int]) -> float:
    """Bits of the distribution of the tokens among these."""
    shares = np.array(list(Counter(tokens).values()), float) / max(1, len(tokens))
    return float(-(shares * np.log2(shares)).sum())


def evaluate_continuations(
    lm: "LM", judge: "LM", places: Sequence[Continuation], *, tokens: int = 64, seed: int = 0, **settings: Any
) -> "tuple[ContinuationResult, list[Generation]]":
    """The model's own continuations, under `settings` over those it recommends, and what they are like."""
    from dlm.inference.generation import generate

    found = generate(lm, [place.prompt for place in places], gen_length=tokens, seed=seed, **settings)
    ids = [[token for token in result.tokens if token != lm.eos_id] for result in found]
    forwards = sum(result.nfe for result in found)
    words = ", ".join(f"{key} = {value}" for key, value in settings.items()) or "as recommended"
    tpf = sum(len(result.tokens) for result in found) / forwards
    return judged(lm, judge, places, ids, lm.name, words, tpf), found


def references(lm: "LM", judge: "LM", places: Sequence[Continuation], seed: int = 0) -> list[ContinuationResult]:
    """The same of the real continuations, and of their tokens in a random order."""
    draw = np.random.default_rng(seed)
    shuffled = [[int(token) for token in draw.permutation(place.real)] for place in places]
    return [
        judged(lm, judge, places, [place.real for place in places], "real", "", None),
        judged(lm, judge, places, shuffled, "shuffled", "", None),
    ]


def judged(
    lm: "LM",
    judge: "LM",
    places: Sequence[Continuation],
    ids: Sequence[Sequence[int]],
    text: str,
    settings: str,
    tpf: float | None,
) -> ContinuationResult:
    """What these continuations, as tokens of `lm`, are like. Empty ones loop by no measure and cost the judge nothing."""
    from dlm.evaluation.score import score

    pairs = [(place.prompt, lm.decode(list(tokens))) for place, tokens in zip(places, ids, strict=True)]
    scores = score(judge, [pair for pair in pairs if pair[1]])
    nats, count = sum(s.nats for s in scores), sum(s.tokens for s in scores)
    return ContinuationResult(
        text=text,
        settings=settings,
        loops=Rate.of(loops(tokens) for tokens in ids),
        perplexity=math.exp(nats / count) if count else math.nan,
        entropy=float(np.mean([entropy(tokens) for tokens in ids])),
        tpf=tpf,
        texts=len(ids),
    )
