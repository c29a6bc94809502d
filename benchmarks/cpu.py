"""What decoding on a CPU costs in float32, bfloat16 and int8, at a temperature, and together on two threads.

    python benchmarks/cpu.py                                  # ours alone
    python benchmarks/cpu.py --peer-path ../Fast-dLLM         # Fast-dLLM's dual cache beside ours, in both dtypes
    python benchmarks/cpu.py --shape large --gen 64 --steps 32 --rounds 2
    python benchmarks/cpu.py --batch                          # eight together on two threads against one by one on one

One process, the same random weights, one thread, contenders in turns; seconds are CPU time (of --batch wall-clock). Shapes:
"small" has width 256, 4 layers and 1,024 tokens; "large" width 512, 8 layers and 32,000 tokens.
"""

import copy
import json
import statistics
from pathlib import Path
from typing import Any

import bare
import fast_dllm
import torch
from measuring import RESULTS, Job, in_turns, machine, parser, ratios, spread, write

import dlm
from dlm.kernels.c import binding, products
from dlm.models import LM, ModelConfig, Transformer
from dlm.models.quantise import quantise
from dlm.models.subnormals import subnormals_as_zeros

SHAPES: dict[str, dict[str, int]] = {
    "small": {"hidden_size": 256, "num_hidden_layers": 4, "intermediate_size": 704, "vocab_size": 1024},
    "large": {"hidden_size": 512, "num_hidden_layers": 8, "intermediate_size": 1408, "vocab_size": 32000},
}
OVER = {
    "bf16": ["fp32", "theirs bf16"], "bf16 int16": ["fp32", "theirs bf16"], "q8": ["fp32"], "drawn": ["fp32"], "fp32": ["theirs fp32"],
    "bf16 dots": ["fp32"], "bf16 widened": ["fp32"], "bf16 torch": ["fp32"], "drawn by torch": ["fp32"],
}  # fmt: skip
"""Whose time each is divided by."""


@subnormals_as_zeros()  # as dlm does for itself; so the peer has it too
def main() -> int:
    words = parser(__doc__)
    words.add_argument("--peer-path", type=Path, help="a checkout of NVlabs/Fast-dLLM; without it only ours runs")
    words.add_argument("--shape", choices=SHAPES, default="small")
    words.add_argument("--prompt", type=int, default=300, help="tokens (300)")
    words.add_argument("--gen", type=int, default=128, help="tokens generated (128)")
    words.add_argument("--steps", type=int, default=64, help="denoising steps (64)")
    words.add_argument("--rounds", type=int, default=5, help="turns of each contender (5)")
    words.add_argument("--batch", action="store_true", help="eight together on two threads, against one by one on one")
    words.add_argument("--output", type=Path, help="the JSON file")
    options = words.parse_args()
    torch.set_num_threads(1)
    lm = model(SHAPES[options.shape])
    numbers = {"gen_length": options.gen, "block_length": 32, "steps": options.steps}
    prompt = torch.randint(0, 1000, (options.prompt,), generator=torch.Generator().manual_seed(1)).tolist()
    rows = batch(lm, prompt, numbers, options.rounds) if options.batch else alone(lm, prompt, numbers, options)
    named = {key: str(value) for key, value in vars(options).items()}
    kinds = {str(dtype).removeprefix("torch."): products.fastest(dtype) for dtype in (torch.bfloat16, torch.int8)}
    report = {
        "machine": machine() | {"kernels": binding.library()[1], "products": kinds},
        "options": named,
        "rows": rows,
    }
    print(json.dumps(report, indent=1))
    write(options.output or RESULTS / f"cpu-{'batch' if options.batch else options.shape}.json", report)
    return 0


def model(shape: dict[str, int]) -> LM:
    heads = shape["hidden_size"] // 64
    sizes = shape | {"num_attention_heads": heads, "num_key_value_heads": heads, "head_dim": 64}
    llada: dict[str, Any] = {"model_type": "llada", "mask_in_softmax": True, "max_position_embeddings": 4096}
    network = Transformer(ModelConfig(mask_token_id=shape["vocab_size"] - 1, **llada, **sizes))
    network.initialise(torch.Generator().manual_seed(0))
    assert network.lm_head is not None
    with torch.no_grad():
        network.lm_head.weight[-1] *= 0.01  # the mask is no favourite, as in a trained model
    return LM(network.eval(), None, "random")


def narrowed(lm: LM, quantised: bool = False) -> LM:
    """A copy in bfloat16, or in int8. Each way to multiply has one of its own: what C reads of a network is kept once."""
    made = LM(copy.deepcopy(lm.network), None, "narrowed")
    if quantised:
        quantise(made.network, "q8", torch.device("cpu"))
    else:
        made.network.to(torch.bfloat16)
    return made


def alone(lm: LM, prompt: list[int], numbers: dict[str, int], options: Any) -> dict[str, Any]:
    """One request on one thread."""
    half, small = narrowed(lm), narrowed(lm, quantised=True)

    def ours(which: LM, **settings: Any) -> Job:
        def run() -> tuple[list[int], int]:
            (found,) = dlm.generate(which, [prompt], cache="dual", **numbers, **settings)
            return found.tokens, found.nfe

        return run

    jobs = {"fp32": ours(lm), "bf16": ours(half), "q8": ours(small), "drawn": ours(lm, temperature=0.7, seed=1)}
    if products.multiplies("int16-dots"):
        jobs["bf16 int16"] = ours(narrowed(lm), kernels="c-int16")
    if options.peer_path:
        for name, which in (("theirs fp32", lm), ("theirs bf16", half)):
            jobs[name] = fast_dllm.jobs(options.peer_path, which, prompt, threshold=None, **numbers)["dual"]
    else:
        jobs["bf16 torch"] = ours(half, kernels="torch")
        if products.multiplies("bf16-dots"):
            jobs |= {
                "bf16 dots": ours(narrowed(lm), kernels="c-dots"),
                "bf16 widened": ours(narrowed(lm), kernels="c-widened"),
            }
    clocks, results = in_turns(jobs, options.rounds)
    times, rows = clocks["cpu"], {}
    for name, taken in times.items():
        rows[name] = {"seconds": min(taken), "median": statistics.median(taken), "forwards": results[name][1]}
        rows[name] |= {
            f"of {other}": spread(ratios(taken, times[other])) for other in OVER.get(name, []) if other in times
        }
    if options.peer_path:
        rows["fp32"]["same_tokens"] = results["fp32"][0] == results["theirs fp32"][0]
    return rows


def batch(lm: LM, prompt: list[int], numbers: dict[str, int], rounds: int) -> dict[str, Any]:
    """Eight requests: together on two threads, together on one, one by one on one; and a thread's copies alone, beside another's."""
    prompts = [prompt[i * 8 :] for i in range(8)]

    def run(threads: int, *parts: list[list[int]]) -> list[list[int]]:
        torch.set_num_threads(threads)
        try:
            return [r.tokens for part in parts for r in dlm.generate(lm, part, cache="dual", **numbers)]
        finally:
            torch.set_num_threads(1)

    def products(threads: int, rows: int, times: int) -> None:
        torch.set_num_threads(threads)
        bare.products(lm, rows, times, multiply=bare.by_ours())
        torch.set_num_threads(1)

    jobs: dict[str, Job] = {
        "together, two threads": lambda: run(2, prompts),
        "together, one thread": lambda: run(1, prompts),
        "one by one": lambda: run(1, *([one] for one in prompts)),
        "products together, two threads": lambda: products(2, 256, 20),
        "products one by one": lambda: products(1, 32, 160),
    }
    clocks, results = in_turns(jobs, rounds)
    times = clocks["wall"]
    rows: dict[str, Any] = {name: {"seconds": min(taken)} for name, taken in times.items()}
    for name, slow in (
        ("together, two threads", "one by one"),
        ("products together, two threads", "products one by one"),
    ):
        rows[name]["gain"] = spread(ratios(times[slow], times[name]))
    rows["same_tokens"] = results["together, two threads"] == results["one by one"]
    return rows


if __name__ == "__main__":
    raise SystemExit(main())
