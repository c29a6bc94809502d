"""One contender of train.py, in a process of its own: `contenders.py NAME PLAN.json` trains, and prints what it took.

Theirs runs in an interpreter with the peer's packages, which may have no dlm.
"""

import json
import platform
import statistics
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from measuring import peak_rss

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


def main(name: str, plan: dict[str, Any]) -> None:
    import torch

    torch.set_num_threads(plan["facts"]["threads"])
    run = ceiling if name == "ceiling" else theirs if name.startswith("theirs") else ours
    result = {**run(name, plan), "peak_rss": peak_rss()}
    versions = {m: sys.modules[m].__version__ for m in ("torch", "transformers", "accelerate") if m in sys.modules}
    print("\n" + json.dumps({**result, "versions": {"python": platform.python_version(), **versions}}))


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


def ceiling(name: str, plan: dict[str, Any]) -> dict[str, Any]:
    import torch

    from dlm.training.profile import gemm_ceiling

    dtype = torch.bfloat16 if plan["facts"]["precision"] == "bf16" else torch.float32
    return {"flops": gemm_ceiling(torch.device("cpu"), dtype)}


def ours(name: str, plan: dict[str, Any]) -> dict[str, Any]:
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
        table = {"train": section, "model": {**plan["model"], "qk_norm": facts["qk_norm"]}, "data": DATA}
        config = TrainConfig.model_validate({**table, "optim": contender["optim"], **QUIET})
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
    result = {"loss": statistics.mean(losses), "parameters": size, "flops_a_token": flops}
    return {**clock.result(facts["warmup"]), **result}


def theirs(name: str, plan: dict[str, Any]) -> dict[str, Any]:
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
    main(sys.argv[1], json.loads(Path(sys.argv[2]).read_text("utf-8")))
