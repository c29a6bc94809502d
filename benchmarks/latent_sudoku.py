"""Sudoku in latent space, beside masked diffusion trained with the same FLOPs: cells and puzzles right."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

BATCH, LAYERS, PUZZLES = 16, 4, 100
SHAPE = {"hidden_size": 96, "num_hidden_layers": LAYERS, "num_attention_heads": 3, "intermediate_size": 256}
SHAPE |= {"position_embedding": "learned"}


def compared(folder: Path, tflop: float) -> dict[str, Any]:
    """Train both, and solve the same held-out puzzles of 30 to 45 empty cells."""
    import torch

    import dlm
    from dlm.evaluation.sudoku import heldout_puzzles

    torch.set_num_threads(1)
    own: dict[str, Any] = {"stage": "autoencoder", "tokens_per_latent": 1, "channels": 16, "token_dropout": 0.0}
    own |= {
        "autoencoder": {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    }
    _train(folder / "autoencoder", 0.0, 100, trainable={"kind": "latent", "own": own})
    flow = {"stage": "flow", "denoiser": SHAPE, "prompt_drop": 0.0, "times": "logit_normal", "times_mean": 1.0}
    start = {"init_from": str(folder / "autoencoder"), "ema": 0.99}
    steps = _train(folder / "flow", tflop, None, start, trainable={"kind": "latent", "own": flow})
    network = {**SHAPE, "num_key_value_heads": 3, "head_dim": 32, "max_position_embeddings": 81}
    objective = {"truncate_probability": 0.0}
    masked = _train(folder / "masked", tflop, None, {"ema": 0.99}, model=network, objective=objective)
    puzzles = heldout_puzzles(PUZZLES, (30, 45), 0)
    given = torch.as_tensor(puzzles.puzzles).long()
    truth = torch.as_tensor(puzzles.solutions).long()
    lm: Any = dlm.load(folder / "flow")
    found: dict[str, Any] = {"tflop": tflop, "steps": {"latent": steps, "masked": masked}}
    for count in (1, 8, 32):
        found[f"latent, {count} steps"] = _right(filled(lm, given, count), given, truth)
    for name, other in {"masked": dlm.load(folder / "masked"), "bundled `sudoku`": dlm.load("sudoku")}.items():
        prompts = torch.where(given == 0, other.require_mask_id(), given).tolist()
        for count in (1, 8, 45):
            results = dlm.infill(other, prompts, rule="margin", steps=count)
            grid = given.clone()
            for row, result in enumerate(results):
                grid[row, given[row] == 0] = torch.tensor(result.tokens)
            found[f"{name}, {count} steps"] = _right(grid, given, truth)
    return found


def filled(lm: Any, given: "Tensor", steps: int) -> "Tensor":
    """Grids whose givens are clean latents and whose other cells are sampled."""
    import torch

    from dlm.latent.sampler import Start, sample

    with torch.no_grad():
        z = lm.network.encode(torch.where(given == 0, 1, given))
        number = torch.arange(len(given))
        start = Start(z=z, clean=given > 0, seed=torch.zeros_like(number), sample=number)
        cells = lm.network.decode(sample(lm.network, start, steps=steps), 81)[..., 1:10].argmax(-1) + 1
    return torch.where(given > 0, given, cells)


def _right(grid: "Tensor", given: "Tensor", truth: "Tensor") -> dict[str, float]:
    from dlm.sudoku.solver import check_solution

    empty = given == 0
    solved = [bool(check_solution(g.numpy().astype("int8"), s.numpy())) for g, s in zip(given, grid, strict=True)]
    return {"cells": float((grid == truth)[empty].float().mean()), "solved": sum(solved) / len(solved)}


def _train(out: Path, tflop: float, steps: int | None, train: dict[str, Any] | None = None, **sections: Any) -> int:
    from dlm import config as toml
    from dlm.training.config import TrainConfig
    from dlm.training.loop import train as run
    from dlm.training.run import Run

    section = {"batch_size": BATCH, "length": 81, "lr": 2e-3, "device": "cpu", "threads": 1, **(train or {})}
    table: dict[str, Any] = {
        "data": {"source": "sudoku", "sudoku_empty": [20, 60]},
        "eval": {"sequences": 0},
        **sections,
    }
    table |= {"optim": {"hidden": {"algorithm": "muon"}}, "checkpoint": {"every": 100}, "log": {"progress": False}}
    if steps is None:
        probe = Run(toml.check(TrainConfig, {**table, "train": {**section, "out": f"{out}/probe"}}, "sudoku"))
        steps = max(4, round(tflop * 1e12 / (probe.flops_a_token * BATCH * 81)))
    config = toml.check(TrainConfig, {**table, "train": {**section, "out": str(out), "steps": steps}}, "sudoku")
    if run(config).stopped_by:
        raise SystemExit("stopped: the same command goes on")
    return steps
