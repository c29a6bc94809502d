"""Latent diffusion beside autoregressive, masked and block diffusion: the same text, parameters and training FLOPs.

    python benchmarks/latent.py                               # every cell, 3 seeds; benchmarks/results/latent.*
    python benchmarks/latent.py --cells ar masked latent --seeds 1 --tflop 0.1      # less of it
    python benchmarks/latent.py --gather                      # only the tables and the plot, of what is finished

A cell is one training run and what is measured of it, with one thread; what is finished is not run again. Tokens are bytes,
so that bits a byte are bits a token. `latent` counts its autoencoder's parameters and FLOPs, too.
"""

import argparse
import json
import math
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from latent_report import written
from measuring import RESULTS, machine, parser

from dlm.atomic import write_text

if TYPE_CHECKING:
    from dlm.models.lm import LM

LENGTH, BATCH, HELD, DRAWS = 128, 8, 64, 8
SAMPLES, WRITTEN, STEPS = 24, 64, (1, 2, 4, 8, 16, 32, 64)
NETWORK = {
    "hidden_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 176,
}
NETWORK |= {"num_hidden_layers": 4, "max_position_embeddings": LENGTH, "tie_word_embeddings": True}
AUTOENCODER = {"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 2}
DENOISER = {"hidden_size": 56, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 144}
CHANNELS, SHARE = 16, 1 / 2
"""Numbers a latent of four bytes; of a latent model's FLOPs those that train its autoencoder."""
DISCRETE: dict[str, dict[str, Any]] = {
    "judge": {"masking": "causal"},  # of another seed than any row: what samples are judged by
    "ar": {"masking": "causal"},
    "masked": {"masking": "random"},
    "block": {"masking": "block", "block_length": 16},
}
LATENT: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # what differs in the autoencoder, and in the flow
    "latent": ({}, {}),
    "latent-block": ({}, {"block_length": 4}),
}
ABLATIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "decoder noise 0": ({"noise": 0.0}, {}),
    "decoder noise 1": ({"noise": 1.0}, {}),
    "32 channels": ({"channels": 32}, {}),
    "2 tokens a latent": ({"tokens_per_latent": 2, "channels": 8}, {}),
    "8 tokens a latent": ({"tokens_per_latent": 8, "channels": 32}, {}),
    "variational (KL)": ({"variational": True, "kl_weight": 1e-3}, {}),
    "aligned to ar": ({"align": "ar"}, {}),
    "path vp": ({}, {"path": "vp"}),
    "no self-conditioning": ({}, {"self_conditioning": False}),
    "times logit-normal": ({}, {"times": "logit_normal"}),
    "times adaptive": ({}, {"times": "adaptive"}),
    "noise 1, aligned, logit-normal": ({"noise": 1.0, "align": "ar"}, {"times": "logit_normal"}),
    "joint": ({}, {"stage": "joint", "encoder_gradient": 0.01, "anchor_weight": 0.1}),
}
AUTOENCODERS: dict[str, tuple[str | None, int, int, int]] = {
    "reconstruction of bytes": (None, 128, 32, 450),
    "reconstruction of pico's tokens": ("pico", 256, 96, 900),
}
"""A tokenizer (None: bytes), the width, numbers a latent of four tokens, and steps."""
SOLVERS = {"euler": 32, "heun": 16, "sde": 32}
"""Steps of each solver, of 32 forwards in all (31 for Heun, whose last step is one of Euler's)."""
CELLS = [*AUTOENCODERS, *DISCRETE, "text", *LATENT, "solvers", "sudoku", "adapter", *ABLATIONS]
ONCE = {*AUTOENCODERS, "judge", "text", "solvers", "sudoku", "adapter", *ABLATIONS}
"""Cells of one seed."""


def main(argv: list[str] | None = None) -> int:
    options = _options(argv)
    results: dict[str, dict[int, Any]] = {}
    for seed in range(options.seeds):
        for name in [cell for cell in options.cells if seed == 0 or cell not in ONCE]:
            results.setdefault(name, {})[seed] = _result(name, seed, options)
    options.results.mkdir(parents=True, exist_ok=True)
    text = "Python's standard library" if options.text is None else Path(options.text).name
    report = {"tflop": options.tflop, "text": text, "cells": results}
    write_text(options.results / "latent.json", json.dumps(report, indent=1) + "\n")
    text = written(report, list(ABLATIONS), None if options.no_plot else options.results / "latent.png")
    write_text(options.results / "latent.md", text + "\n")
    print("\n" + text)
    return 0


def _options(argv: list[str] | None) -> argparse.Namespace:
    words = parser(__doc__)
    add = words.add_argument
    add("--cells", nargs="+", choices=CELLS, default=CELLS, metavar="CELL", help=f"of {', '.join(CELLS)} (all)")
    add("--seeds", type=int, default=3, help="runs of each main cell (3); ablations have one")
    add(
        "--tflop",
        type=float,
        default=0.2,
        help="training FLOPs of a run, in 10^12 (0.2: minutes for the whole, and hardly trained)",
    )
    add("--text", help="a text file or folder in place of Python's standard library, as tinyshakespeare.txt")
    add("--out", type=Path, default=Path("runs/latent-benchmark"), help="where runs are kept")
    add("--results", type=Path, default=RESULTS, help="folder of the tables, JSON and plot")
    add("--gather", action="store_true", help="run nothing")
    add("--no-plot", action="store_true", help="draw nothing")
    return words.parse_args(argv)


def _file(options: argparse.Namespace, name: str, seed: int) -> Path:
    return options.out / f"{name.replace(' ', '-')}-{seed}" / "result.json"


def _result(name: str, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    file = _file(options, name, seed)
    if not file.is_file() and not options.gather:
        print(f"{name}, seed {seed}", flush=True)
        before = time.process_time()
        try:
            found = measured(name, seed, options)
        except Exception as error:  # what cannot run fails its cell alone
            print(f"  failed: {type(error).__name__}: {error}", flush=True)
            return {"failed": f"{type(error).__name__}: {error}"}
        found |= {"machine": machine(), "cpu_seconds": time.process_time() - before}
        file.parent.mkdir(parents=True, exist_ok=True)
        write_text(file, json.dumps(found))
    return json.loads(file.read_text("utf-8")) if file.is_file() else {"failed": "not run"}


# --- a cell ---------------------------------------------------------------------------------------------------------


def measured(name: str, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """Train what the cell is about, and measure it."""
    import torch

    torch.set_num_threads(1)
    if name in AUTOENCODERS:
        return reconstruction(name, options)
    if name == "text":
        return text(options)
    if name == "sudoku":
        return sudoku(options)
    if name == "adapter":
        return adapter(options)
    if name == "solvers":
        return solvers(options)
    if name in DISCRETE:
        lm, flops = discrete(name, 99 if name == "judge" else seed, options)
    else:
        lm, flops = flowing(name, seed, options)
    found = {"flops": flops, "parameters": sum(p.numel() for p in lm.network.parameters()), **cost(lm, options)}
    if name != "judge":
        found["samples"] = [] if seed else sampled(lm, options, (32,) if name in ABLATIONS else STEPS)
    return found


def _config(out: Path, seed: int, options: argparse.Namespace, **sections: Any) -> Any:
    from dlm import config as toml
    from dlm.training.config import TrainConfig

    train = {"out": str(out), "seed": seed, "batch_size": BATCH, "length": LENGTH, "lr": 2e-3, "device": "cpu"}
    train |= {"threads": 1, "tokenizer": str(_tokenizer(options)), **sections.pop("train", {})}
    table = {"train": train, "data": _data(options), "optim": {"hidden": {"algorithm": "muon", "lr_scale": 2.0}}}
    table |= {"eval": {"sequences": 0}, "checkpoint": {"every": 100}, "log": {"progress": False}}
    return toml.check(TrainConfig, table | sections, "benchmarks/latent.py")


def _data(options: argparse.Namespace) -> dict[str, Any]:
    return {"source": "text", "paths": [options.text]} if options.text else {"source": "stdlib"}


def _tokenizer(options: argparse.Namespace) -> Path:
    """Bytes and two special tokens."""
    from dlm.data.config import DataConfig, TokenizerConfig
    from dlm.data.tokenizer_training import train_tokenizer

    folder = options.out / "tokenizer"
    if not folder.is_dir():
        data = DataConfig.model_validate(_data(options))
        train_tokenizer(TokenizerConfig(output=str(folder), vocab_size=260, chat_tokens=False, data=data))
    return folder


def _steps(flops_a_token: float, tokens: int, tflop: float) -> int:
    return max(4, round(tflop * 1e12 / (flops_a_token * tokens)))


def _trained(config: Any, tflop: float) -> float:
    """Train for so many FLOPs; what it took, in 10^12."""
    from dlm.training.loop import train
    from dlm.training.run import Run

    probe = Run(
        config.model_copy(update={"train": config.train.model_copy(update={"out": config.train.out + "/probe"})})
    )
    tokens = config.train.batch_size * LENGTH
    steps = _steps(probe.flops_a_token, tokens, tflop)
    section = config.train.model_copy(update={"steps": steps, "warmup_steps": min(50, steps // 10)})
    if train(config.model_copy(update={"train": section})).stopped_by:
        raise SystemExit("stopped: the same command goes on")
    return steps * probe.flops_a_token * tokens / 1e12


def discrete(name: str, seed: int, options: argparse.Namespace) -> "tuple[LM, float]":
    """A Transformer on tokens."""
    import dlm

    out = options.out / f"{name}-{seed}" / "model"
    objective = {"truncate_probability": 0.0, **DISCRETE[name]}
    flops = _trained(_config(out, seed, options, model=NETWORK, objective=objective), options.tflop)
    return dlm.load(out), flops


def flowing(name: str, seed: int, options: argparse.Namespace) -> "tuple[LM, float]":
    """An autoencoder, then its flow; the autoencoder of `latent` serves all that differ in the flow alone."""
    import dlm

    coding, more = {**LATENT, **ABLATIONS}[name]
    folder = options.out / f"{(name if coding else 'latent').replace(' ', '-')}-{seed}"
    first = {"stage": "autoencoder", "channels": CHANNELS, "autoencoder": AUTOENCODER, **coding}
    if "align" in first:
        first["align"] = str(options.out / f"ar-{seed}" / "model")
    spent = _trained(_stage(folder / "autoencoder", seed, options, first), SHARE * options.tflop)
    out = options.out / f"{name.replace(' ', '-')}-{seed}" / "model"
    start = {"train": {"init_from": str(folder / "autoencoder"), "ema": 0.99}}
    second = {"stage": "flow", "denoiser": DENOISER, **more}
    spent += _trained(_stage(out, seed, options, second, **start), (1 - SHARE) * options.tflop)
    return dlm.load(out), spent


def _stage(out: Path, seed: int, options: argparse.Namespace, own: dict[str, Any], **sections: Any) -> Any:
    train = sections.pop("train", {})
    train = {"batch_size": 2 * BATCH, **train, **({"tokenizer": None} if "init_from" in train else {})}
    return _config(out, seed, options, train=train, trainable={"kind": "latent", "own": own}, **sections)


def _rows(options: argparse.Namespace, split: str, count: int, tokenizer: str | None = None) -> Any:
    """Sequences of one split; of the held-out one the same for every cell."""
    import torch

    from dlm.data.config import DataConfig
    from dlm.data.source import build_stream
    from dlm.data.tokenizer import load_tokenizer
    from dlm.models.finding import bundled
    from dlm.training.validate import HeldOut

    reader = load_tokenizer(_tokenizer(options) if tokenizer is None else bundled()[tokenizer])
    stream = build_stream(DataConfig.model_validate(_data(options)), reader, LENGTH, split, 0, shorten=True)
    return HeldOut(stream, count, 16, torch.as_tensor(reader.token_bytes))


def cost(lm: "LM", options: argparse.Namespace) -> dict[str, Any]:
    """Bits a byte of held-out text, with the error of the draws and that of the choice of sequences."""
    import torch

    from dlm.training.scoring import TokenCosts

    held = _rows(options, "heldout", HELD)
    costs: Any = lm if lm.refuses else TokenCosts(lm.network)
    found = held.bound(costs, DRAWS)
    assert found.bits_per_byte is not None
    each = torch.cat([costs.nats(ids, answer, torch.arange(len(ids)), 1, 0).mean(-1) for ids, answer in held.batches])
    bits = each / LENGTH / math.log(2)
    return {
        "bits": found.bits_per_byte[0],
        "error": found.bits_per_byte[1],
        "spread": float(bits.std() / len(bits) ** 0.5),
    }


def sampled(lm: "LM", options: argparse.Namespace, steps: tuple[int, ...], **how: Any) -> list[dict[str, Any]]:
    """Texts from nothing at several numbers of steps: what a judge makes of them, and what they take."""
    from latent_quality import figures

    import dlm

    judge = dlm.load(options.out / "judge-99" / "model")
    real = [ids for rows, _ in _rows(options, "heldout", HELD).batches for ids in rows[:, :WRITTEN].tolist()]
    found = []
    causal, blocks = lm.config.attention == "causal", lm.config.attention == "block_causal"
    for count in (WRITTEN,) if causal else [n for n in steps if not blocks or n >= WRITTEN // 16]:
        kind: dict[str, Any] = (
            {"solver": "euler"} if lm.refuses else {"temperature": 1.0, **({} if causal else {"rule": "random"})}
        )
        if not lm.refuses and not causal and not blocks:
            kind["block_length"] = WRITTEN
        given: dict[str, Any] = {**kind, "steps": count, **how}
        if causal:
            given.pop("steps")
        prompt = [lm.eos_id or 0] if causal else []
        before = time.perf_counter()
        texts = dlm.generate(lm, [prompt], gen_length=WRITTEN, num_samples=SAMPLES, seed=1, **given)
        seconds = time.perf_counter() - before
        size = sum(len(text.tokens) for text in texts)
        row = {"steps": count, "nfe": texts[0].nfe, "tokens_a_second": size / seconds, "example": texts[0].text}
        found.append({**row, **figures(judge, [text.tokens for text in texts], real)})
    return found


def text(options: argparse.Namespace) -> dict[str, Any]:
    """What the judge makes of real text, and of the same with its bytes shuffled in each sample."""
    import torch
    from latent_quality import figures

    import dlm

    judge = dlm.load(options.out / "judge-99" / "model")
    rows = torch.cat([ids for ids, _ in _rows(options, "heldout", HELD).batches])
    ours, real = (part.tolist() for part in (rows[:SAMPLES, WRITTEN:], rows[:, :WRITTEN]))
    generator = torch.Generator().manual_seed(0)
    shuffled = [[row[i] for i in torch.randperm(len(row), generator=generator).tolist()] for row in ours]
    return {"real": figures(judge, ours, real), "shuffled": figures(judge, shuffled, real)}


def reconstruction(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """A larger autoencoder, alone: how many held-out tokens come back under noise."""
    import torch

    from dlm.latent.trainable import reconstruction as right
    from dlm.training.loop import train

    tokenizer, width, channels, steps = AUTOENCODERS[name]
    own = {"stage": "autoencoder", "channels": channels, "noise": 0.5, "token_dropout": 0.0, "latent_dropout": 0.05}
    own["autoencoder"] = {
        "hidden_size": width,
        "intermediate_size": 2 * width,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    out = options.out / f"{name.replace(' ', '-')}-0" / "model"
    steps = round(steps * min(1.0, options.tflop / 0.2))
    plan = {"steps": steps, "batch_size": 16, "ema": 0.99, "schedule": "linear"}
    if train(_stage(out, 0, options, own, train=plan | ({"tokenizer": tokenizer} if tokenizer else {}))).stopped_by:
        raise SystemExit("stopped: the same command goes on")
    import dlm

    network: Any = dlm.load(out).network
    rows = torch.cat([ids for ids, _ in _rows(options, "heldout", 256, tokenizer).batches])
    return {"steps": steps, **right(network, rows)}


def adapter(options: argparse.Namespace) -> dict[str, Any]:
    """VFM after the flow of seed 0: one step from the adapter's noise beside one from standard normal noise."""
    import dlm

    start = {"train": {"init_from": str(options.out / "latent-0" / "model"), "ema": 0.99, "lr": 1e-3}}
    own = {"stage": "adapter", "prompt_probability": 1.0}
    out = options.out / "adapter-0" / "model"
    flops = _trained(_stage(out, 0, options, own, **start), (1 - SHARE) * options.tflop / 2)
    lm = dlm.load(out)
    one = sampled(lm, options, (1,))[0]
    return {"flops": flops, "normal": one, "adapter": sampled(lm, options, (1,), solver="adapter")[0]}


def solvers(options: argparse.Namespace) -> dict[str, Any]:
    """The flow of seed 0, written with each solver at as many forwards."""
    import dlm

    lm = dlm.load(options.out / "latent-0" / "model")
    return {name: sampled(lm, options, (steps,), solver=name)[0] for name, steps in SOLVERS.items()}


def sudoku(options: argparse.Namespace) -> dict[str, Any]:
    """Held-out puzzles in latent space, a latent a cell, givens clean; and masked diffusion: each with five times a cell's FLOPs."""
    from latent_sudoku import compared

    return compared(options.out / "sudoku-0", 5 * options.tflop)


if __name__ == "__main__":
    raise SystemExit(main())
