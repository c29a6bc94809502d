"""How fast training is, beside the MDLM trainer of the `dllm` package: measure, print a table, write JSON.

    python benchmarks/train.py                                            # ours alone
    python benchmarks/train.py --peer-path ../dllm --peer-python ../dllm/.venv/bin/python
    python benchmarks/train.py --threads 1 --steps 30 --rounds 5 --only ours-adamw-compiled theirs-compiled --peer-path ../dllm

Every contender trains the same shape from scratch on the same token sequences with the same batch, length, precision and
thread count, each time in a process of its own, and rounds go through all of them, so that ratios are taken under the
same load. Theirs runs as its own `examples/a2d/mdlm/pt.py` does; saving and evaluation are off in both.
"""

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dlm.data.tokenizer import Tokenizer

RESULTS = Path(__file__).parent / "results"
SHAPES = {
    "tiny": {"layers": 2, "width": 64, "heads": 2, "ffn": 192, "vocab": 1024, "length": 64, "batch": 4},
    "small": {"layers": 4, "width": 256, "heads": 4, "ffn": 704, "vocab": 8192, "length": 256, "batch": 8},
    "medium": {"layers": 8, "width": 512, "heads": 8, "ffn": 1408, "vocab": 16384, "length": 512, "batch": 8},
    "large": {"layers": 28, "width": 2048, "heads": 16, "ffn": 6144, "vocab": 65536, "length": 1024, "batch": 8},
}
DATA = {"source": "stdlib"}
QUIET = {  # every step has all its tokens, and nothing else is done between steps
    "objective": {"truncate_probability": 0.0},
    "eval": {"sequences": 0},
    "checkpoint": {"every": 0},
    "log": {"progress": False},
}
MUON = {"algorithm": "muon", "lr_scale": 2.0, "weight_decay": 0.01}
CONTENDERS: dict[str, dict[str, Any]] = {
    "ours-adamw": {"optim": {}, "compile": False},
    "ours-adamw-compiled": {"optim": {}, "compile": True},
    "ours-muon": {"optim": {"hidden": MUON}, "compile": False},
    "ours-muon-compiled": {"optim": {"hidden": MUON}, "compile": True},
    "theirs": {"compile": False},
    "theirs-compiled": {"compile": True},
}
PAIRS = {"theirs": "eager", "theirs-compiled": "compiled"}  # what a speed is divided by, and the column's name


def main(argv: list[str] | None = None) -> int:
    options = _options(argv)
    if options.contender:
        return _inside(options.contender, json.loads(options.plan.read_text("utf-8")))
    with tempfile.TemporaryDirectory(prefix="dlm-train-benchmark-") as scratch:
        plan = _plan(options, Path(scratch))
        rounds: list[dict[str, dict[str, Any]]] = []
        for number in range(options.rounds):
            rounds.append({name: _outside(name, plan, options) for name in ("ceiling", *options.only)})
            speeds = "  ".join(f"{name} {_speed(rounds[-1][name], plan):,.0f}" for name in options.only)
            print(f"round {number + 1}/{options.rounds}, tokens/s: {speeds}", flush=True)
    from dlm.evaluation.card import machine

    versions = {name: rounds[0][name].pop("versions") for name in rounds[0]}
    report = {
        "machine": machine(),
        **plan["facts"],
        "versions": versions,
        "results": summarise(rounds, plan),
        "rounds": rounds,
    }
    print("\n" + table(report))
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(report, indent=1) + "\n", "utf-8")
    print(f"\nwritten: {options.output}")
    return 0


def _options(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--peer-path", type=Path, help="a checkout of ZHZisZZ/dllm; without it only ours runs")
    add("--peer-python", default=sys.executable, help="interpreter with their dependencies (this one)")
    add("--only", nargs="+", choices=list(CONTENDERS), help="contenders (all)")
    add("--shape", choices=list(SHAPES), default="small", help="shape of network and batch (small)")
    add("--qk-norm", action="store_true", help="norms on queries and keys: their Qwen3 class, not their Llama class")
    add("--precision", choices=["fp32", "bf16"], default="fp32", help="bf16 is autocast in both (fp32)")
    add("--threads", type=int, default=os.cpu_count(), help="CPU threads (all)")
    add("--steps", type=int, default=20, help="timed optimiser steps a round (20)")
    add("--warmup", type=int, default=5, help="untimed steps before them; compilation falls in there (5)")
    add("--rounds", type=int, default=5, help="processes of each contender (5)")
    add("--output", type=Path, default=RESULTS / "train.json", help="the JSON file")
    add("--contender", help=argparse.SUPPRESS)
    add("--plan", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.peer_path and not (options.peer_path / "dllm" / "core" / "trainers" / "mdlm.py").is_file():
        parser.error(f"--peer-path {options.peer_path} is no checkout of dllm: dllm/core/trainers/mdlm.py is not there")
    if min(options.threads, options.steps, options.warmup, options.rounds) < 1:
        parser.error("--threads, --steps, --warmup and --rounds are at least 1")
    possible = [name for name in CONTENDERS if options.peer_path or not name.startswith("theirs")]
    unknown = set(options.only or ()) - set(possible)
    if unknown:
        parser.error(f"--only {' '.join(sorted(unknown))}: needs --peer-path")
    options.only = options.only or possible
    return options


# --- the parent: data, processes, the summary --------------------------------------------------------------------------


def _plan(options: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    """Everything a contender needs, written to a file: our config, the token sequences, their shape."""
    os.environ["DLM_CACHE"] = str(scratch / "cache")  # neither reads nor fills the user's
    import numpy as np

    from dlm.data import DataConfig, build_stream

    s = SHAPES[options.shape]
    print("tokenising the standard library", flush=True)
    tokenizer = tokenizer_of(s["vocab"], scratch / "tokenizer")
    steps = options.warmup + options.steps
    stream = build_stream(DataConfig(**DATA), tokenizer, s["length"], "train", 0)
    np.save(scratch / "tokens.npy", np.stack([next(stream)["input_ids"] for _ in range(steps * s["batch"])]))
    model = network_of(s) | {"rms_norm_eps": 1e-6}
    facts = {key: getattr(options, key) for key in ("shape", "precision", "qk_norm", "threads", "steps", "warmup")}
    plan = {"scratch": str(scratch), "model": model, "facts": {**facts, **s}}
    (scratch / "plan.json").write_text(json.dumps(plan), "utf-8")
    return plan


def tokenizer_of(vocab_size: int, folder: Path) -> "Tokenizer":
    """A tokenizer of this size, of the standard library, written into `folder`."""
    from dlm.data import DataConfig, TokenizerConfig, train_tokenizer

    data = DataConfig(**DATA)
    return train_tokenizer(TokenizerConfig(output=str(folder), vocab_size=vocab_size, max_documents=400, data=data))


def network_of(shape: dict[str, int]) -> dict[str, Any]:
    """A line of SHAPES as [model]."""
    return {
        "vocab_size": shape["vocab"],
        "hidden_size": shape["width"],
        "num_hidden_layers": shape["layers"],
        "num_attention_heads": shape["heads"],
        "num_key_value_heads": shape["heads"],
        "head_dim": shape["width"] // shape["heads"],
        "intermediate_size": shape["ffn"],
        "tie_word_embeddings": True,
    }


def _outside(name: str, plan: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    """One contender in its own process; what it measured."""
    theirs = name.startswith("theirs")
    environment = {**os.environ, "OMP_NUM_THREADS": str(options.threads), "TOKENIZERS_PARALLELISM": "false"}
    root = options.peer_path.resolve() if theirs else Path(__file__).resolve().parents[1]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(root), os.environ.get("PYTHONPATH"))))
    command = [options.peer_python if theirs else sys.executable, __file__, "--contender", name]
    command += ["--plan", str(Path(plan["scratch"]) / "plan.json")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=plan["scratch"])
    if done.returncode:
        raise SystemExit(f"{name} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def summarise(rounds: list[dict[str, dict[str, Any]]], plan: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """For each contender the median over rounds, with smallest and largest; ratios are taken within a round."""
    results = {}
    for name in rounds[0]:
        if name == "ceiling":
            results[name] = {"gflops": _spread([r[name]["flops"] / 1e9 for r in rounds])}
            continue
        flops = next(r[n]["flops_a_token"] for r in rounds for n in r if "flops_a_token" in r[n])
        results[name] = {
            "tokens_per_second": _spread([_speed(r[name], plan) for r in rounds]),
            "mfu": _spread([_speed(r[name], plan) * flops / r["ceiling"]["flops"] for r in rounds]),
            "cpu_seconds_a_step": _spread([statistics.median(r[name]["cpu_seconds"]) for r in rounds]),
            "peak_rss_mib": _spread([r[name]["peak_rss"] / 2**20 for r in rounds]),
            "loss": rounds[-1][name]["loss"],
        }
        for peer in set(PAIRS) & set(rounds[0]):
            ratios = [_speed(r[name], plan) / _speed(r[peer], plan) for r in rounds]
            results[name][f"times_{peer}"] = _spread(ratios)
    sizes = {r[n]["parameters"] for r in rounds for n in r if "parameters" in r[n]}
    if len(sizes) != 1:
        raise SystemExit(f"the contenders' networks differ in size: {sorted(sizes)} parameters")
    return results


def _speed(result: dict[str, Any], plan: dict[str, Any]) -> float:
    """Tokens a second by the median step, which another process's burst does not move."""
    return plan["facts"]["batch"] * plan["facts"]["length"] / statistics.median(result["seconds"])


def _spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "low": min(values), "high": max(values)}


def table(report: dict[str, Any]) -> str:
    """The summary as a Markdown table."""
    results = report["results"]
    peers = [peer for peer in PAIRS if peer in results]
    heads = [
        "",
        "tokens/s",
        "low–high",
        "MFU",
        "peak RSS",
        "CPU s/step",
        "loss",
        *(f"× theirs, {PAIRS[p]}" for p in peers),
    ]
    lines = ["| " + " | ".join(heads) + " |", "|---" + "|---:" * (len(heads) - 1) + "|"]
    for name, r in results.items():
        if name == "ceiling":
            continue
        speed = r["tokens_per_second"]
        cells = [
            name,
            f"{speed['median']:,.0f}",
            f"{speed['low']:,.0f}–{speed['high']:,.0f}",
            f"{r['mfu']['median']:.1%}",
        ]
        cells += [
            f"{r['peak_rss_mib']['median']:,.0f} MiB",
            f"{r['cpu_seconds_a_step']['median']:.3f}",
            f"{r['loss']:.3f}",
        ]
        cells += ["{median:.2f} ({low:.2f}–{high:.2f})".format(**r[f"times_{p}"]) for p in peers]
        lines.append("| " + " | ".join(cells) + " |")
    facts = "{layers} layers, width {width}, {heads} heads, feed-forward {ffn}, vocabulary {vocab}, batch {batch} × {length}".format(
        **report
    )
    ceiling = results["ceiling"]["gflops"]["median"]
    return (
        f"{facts}; {report['precision']}, {report['threads']} threads, GEMM ceiling {ceiling:,.0f} GFLOP/s\n\n"
        + "\n".join(lines)
    )


# --- the child: one contender ------------------------------------------------------------------------------------------


class Clock:
    """Wall and processor time of every step, from its predecessor's end to its own."""

    def __init__(self) -> None:
        self.wall, self.cpu = [time.perf_counter()], [time.process_time()]

    def tick(self) -> None:
        self.wall.append(time.perf_counter())
        self.cpu.append(time.process_time())

    def result(self, warmup: int) -> dict[str, Any]:
        wall, cpu = ([b - a for a, b in pairwise(times)] for times in (self.wall, self.cpu))
        return {"seconds": wall[warmup:], "cpu_seconds": cpu[warmup:], "warmup_seconds": sum(wall[:warmup])}


def _inside(name: str, plan: dict[str, Any]) -> int:
    import torch

    torch.set_num_threads(plan["facts"]["threads"])
    run = _ceiling if name == "ceiling" else _theirs if name.startswith("theirs") else _ours
    result = run(name, plan)
    versions = {m: sys.modules[m].__version__ for m in ("torch", "transformers", "accelerate") if m in sys.modules}
    print(
        "\n"
        + json.dumps({**result, "peak_rss": _peak_rss(), "versions": {"python": platform.python_version(), **versions}})
    )
    return 0


def _peak_rss() -> int:
    """Bytes. The kernel's own figure where there is one: getrusage's also remembers the parent before exec."""
    status = Path("/proc/self/status")
    if status.exists():
        return next(int(line.split()[1]) for line in status.read_text().splitlines() if line.startswith("VmHWM")) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _ceiling(name: str, plan: dict[str, Any]) -> dict[str, Any]:
    import torch

    from dlm.training.profile import gemm_ceiling

    dtype = torch.bfloat16 if plan["facts"]["precision"] == "bf16" else torch.float32
    return {"flops": gemm_ceiling(torch.device("cpu"), dtype)}


def _ours(name: str, plan: dict[str, Any]) -> dict[str, Any]:
    """`dlm.train` on the stream that the token sequences were taken from."""
    from dlm.training.config import TrainConfig
    from dlm.training.loop import go
    from dlm.training.profile import flops_a_token
    from dlm.training.run import Run

    facts, contender = plan["facts"], CONTENDERS[name]
    steps = facts["warmup"] + facts["steps"]
    with tempfile.TemporaryDirectory(dir=plan["scratch"]) as out:
        section = {name: facts[name] for name in ("length", "precision", "threads")}
        section |= {"out": out, "tokenizer": str(Path(plan["scratch"]) / "tokenizer"), "steps": steps, "lr": 1e-3}
        section |= {"batch_size": facts["batch"], "device": "cpu"}
        section |= {"compile": contender["compile"], "warmup_steps": steps // 10}
        config = TrainConfig.model_validate(
            {
                "train": section,
                "model": {**plan["model"], "qk_norm": facts["qk_norm"]},
                "data": DATA,
                "optim": contender["optim"],
                **QUIET,
            }
        )
        run, clock = Run(config), Clock()
        step = run.optimiser_step

        def timed() -> tuple[dict[str, float], float]:
            parts, norm = step()
            clock.tick()
            return parts, norm

        run.optimiser_step = timed
        losses = go(run).losses
    size = sum(p.numel() for p in run.network.parameters())
    flops = flops_a_token(run.network.config, size, facts["length"])
    return {
        **clock.result(facts["warmup"]),
        "loss": statistics.mean(losses),
        "parameters": size,
        "flops_a_token": flops,
    }


def _theirs(name: str, plan: dict[str, Any]) -> dict[str, Any]:
    """Their MDLMTrainer on their bidirectional Llama (or Qwen3), set up as their pre-training example sets it up."""
    import numpy as np
    import transformers
    from datasets import Dataset
    from dllm.core.trainers import MDLMConfig, MDLMTrainer
    from dllm.pipelines import a2d

    facts, scratch = plan["facts"], Path(plan["scratch"])
    kind = "Qwen3" if facts["qk_norm"] else "Llama"
    transformers.set_seed(0)
    model = getattr(a2d, f"A2D{kind}LMHeadModel")(
        getattr(a2d, f"A2D{kind}Config")(**plan["model"], max_position_embeddings=2048)
    )
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(scratch / "tokenizer", padding_side="right")
    rows = np.load(scratch / "tokens.npy").tolist()
    steps, clock = facts["warmup"] + facts["steps"], Clock()

    class Ticks(transformers.TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            clock.tick()

    with tempfile.TemporaryDirectory(dir=scratch) as out:
        arguments = MDLMConfig(
            output_dir=out,
            max_steps=steps,
            logging_steps=steps,
            per_device_train_batch_size=facts["batch"],
            learning_rate=1e-3,
            bf16=facts["precision"] == "bf16",
            use_cpu=True,
            torch_compile=CONTENDERS[name]["compile"],
            eval_strategy="no",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        trainer = MDLMTrainer(
            model=model,
            processing_class=tokenizer,
            train_dataset=Dataset.from_dict({"input_ids": rows, "labels": rows}),
            args=arguments,
            data_collator=transformers.DataCollatorForSeq2Seq(tokenizer, return_tensors="pt", padding=True),
            callbacks=[Ticks()],
        )
        loss = trainer.train().training_loss
    size = sum(p.numel() for p in model.parameters())
    return {**clock.result(facts["warmup"]), "loss": loss, "parameters": size}


if __name__ == "__main__":
    raise SystemExit(main())
