"""The figures of [watch], drawn by matplotlib from plain numbers and strings."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from dlm.atomic import replacing

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Okabe and Ito's colours, which colour-blind readers tell apart; right and wrong differ in hatching too.
BLUE, ORANGE, GIVEN = "#0072B2", "#D55E00", "#E4E4E4"
STEPS = "cividis"
ACROSS = 16  # tokens a line
SHOWN = 64  # tokens of a strip
BINS = 8


@dataclass(frozen=True)
class Point:
    """One row of a training batch: the share of its answer that was predicted, and nats a predicted token."""

    step: int
    ratio: float
    loss: float


@dataclass(frozen=True)
class Strip:
    """One row's tokens at one level of masking: predicted or given, and how right and how confident the model was."""

    predicted: Sequence[bool]
    right: Sequence[bool]
    confidence: Sequence[float]

    @property
    def level(self) -> float:
        return sum(self.predicted) / max(1, len(self.predicted))


def loss_by_ratio(points: Sequence[Point]) -> "Figure":
    """Loss against mask ratio, newer rows darker, and the mean of each eighth of the axis."""
    figure = _figure(6.4, 4.2)
    axes = figure.subplots()
    ratio, loss = np.array([p.ratio for p in points]), np.array([p.loss for p in points])
    steps = np.array([p.step for p in points])
    age = (steps.max() - steps) / max(1, steps.max() - steps.min())
    axes.scatter(ratio, loss, s=14, c=BLUE, alpha=0.9 - 0.7 * age, linewidths=0, label="a row of a batch")
    part = np.minimum((ratio * BINS).astype(int), BINS - 1)
    filled = np.unique(part)
    means = [loss[part == b].mean() for b in filled]
    axes.plot((filled + 0.5) / BINS, means, color=ORANGE, marker="s", markersize=5, label="mean of an eighth")
    axes.set(xlim=(-0.02, 1.02), xlabel="mask ratio: share of the answer that is predicted")
    axes.set(ylim=(0, None), ylabel="cross-entropy, nats a masked token")
    first, last = steps.min(), steps.max()
    which = f"step {last}" if first == last else f"steps {first} (pale) to {last} (dark)"
    axes.set_title(f"Loss by mask ratio, {which}", fontsize=11)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    return figure


def trajectory(tokens: Sequence[str], steps: Sequence[int]) -> "Figure":
    """A decoded text in lines of 16 tokens, each token's cell coloured by the step that committed it."""
    lines = -(-len(tokens) // ACROSS)
    figure = _figure(11, 1.3 + 0.42 * lines)
    axes = figure.subplots()
    when = np.full(lines * ACROSS, np.nan)
    when[: len(steps)] = steps
    last = max(1, *steps)
    image = axes.imshow(when.reshape(lines, ACROSS), cmap=STEPS, vmin=0, vmax=last, aspect="auto")
    for position, (token, step) in enumerate(zip(tokens, steps, strict=True)):
        colour = "white" if step < 0.55 * last else "black"
        ink = {"color": colour, "ha": "center", "va": "center", "fontsize": 7, "family": "monospace"}
        axes.text(position % ACROSS, position // ACROSS, _short(token, 8), parse_math=False, **ink)
    axes.set_xticks(range(ACROSS))
    axes.set_yticks(range(lines), [str(line * ACROSS) for line in range(lines)])
    axes.set(xlabel="token of the line", ylabel="tokens before it")
    axes.set_title(f"Which step committed which token: {len(tokens)} tokens in {len(set(steps))} steps", fontsize=11)
    figure.colorbar(image, ax=axes, label="step", pad=0.01)
    return figure


def confidence_strip(tokens: Sequence[str], strips: Sequence[Strip]) -> "Figure":
    """A held-out text at several levels of masking: bars are the confidence in the best token, by whether it is right."""
    tokens = tokens[:SHOWN]
    figure = _figure(max(6.0, 1.2 + 0.19 * len(tokens)), 1.2 + 0.95 * len(strips))
    panels = figure.subplots(len(strips), sharex=True, squeeze=False)[:, 0]
    for axes, strip in zip(panels, strips, strict=True):
        for at in range(len(tokens)):
            if not strip.predicted[at]:
                axes.axvspan(at - 0.5, at + 0.5, color=GIVEN, linewidth=0)
        for right, colour, hatch in ((True, BLUE, None), (False, ORANGE, "////")):
            bars = [i for i in range(len(tokens)) if strip.predicted[i] and strip.right[i] == right]
            heights = [strip.confidence[i] for i in bars]
            axes.bar(bars, heights, width=0.86, color=colour, hatch=hatch, edgecolor="white", linewidth=0)
        right = [r for chosen, r in zip(strip.predicted, strip.right, strict=True) if chosen]
        share = f"{sum(right) / len(right):.0%}" if right else "–"
        axes.set(xlim=(-0.5, len(tokens) - 0.5), ylim=(0, 1), yticks=(0, 0.5, 1))
        axes.set_ylabel(f"{strip.level:.0%} predicted\n{share} right", fontsize=8, rotation=0, ha="right", va="center")
        axes.tick_params(labelsize=7, bottom=False)
    panels[-1].set_xticks(range(len(tokens)), [_short(t, 10) for t in tokens], rotation=90, parse_math=False)
    panels[-1].tick_params(labelfontfamily="monospace")
    panels[-1].set_xlabel("the true tokens")
    _legend(figure)
    return figure


def save(figure: "Figure", file: Path) -> None:
    """The figure as a PNG file."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with replacing(file) as temporary:
        figure.savefig(temporary, format="png")


def pixels(figure: "Figure") -> NDArray[np.uint8]:
    """The figure as (height, width, 3)."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())[..., :3].copy()


def _figure(width: float, height: float) -> "Figure":
    """A figure of its own, without pyplot: a notebook's state and back end stay what they are."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), dpi=120, layout="constrained")


def _legend(figure: "Figure") -> None:
    from matplotlib.patches import Patch

    kinds = [Patch(color=BLUE, label="right"), Patch(facecolor=ORANGE, hatch="////", edgecolor="white", label="wrong")]
    kinds.append(Patch(color=GIVEN, label="given"))
    title = "Confidence in the most probable token of a held-out text"
    figure.legend(handles=kinds, loc="outside upper center", ncols=3, fontsize=8, title=title, frameon=False)


def _short(token: str, most: int) -> str:
    """A token as drawn: white space as signs, indentation as 8·, non-ASCII as escapes, cut to `most` characters."""
    seen = token.replace("\n", "↵").replace("\t", "⇥").replace(" ", "·")
    seen = re.sub("·{3,}", lambda run: f"{len(run[0])}·", seen)
    seen = "".join(c if c in "↵⇥·" or (c.isascii() and c.isprintable()) else ascii(c)[1:-1] for c in seen)
    return seen if len(seen) <= most else seen[: most - 1] + "…"
