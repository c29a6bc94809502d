"""Speculative decoding: tokens a second, τ and acceptance by position, beside plain exact decoding and others' loops.

    python benchmarks/speculative.py --model smollm2 --draft folder --prompts gsm8k_test.jsonl
    python benchmarks/speculative.py --model folder --peers transformers       # assisted by prompt lookup, batch 1
    python benchmarks/speculative.py --model folder --draft folder --peer-path site-packages-with-dflash
    python benchmarks/speculative.py --cost                                    # what τ would give at Qwen3-8B's shape

Contenders take turns, prompt by prompt or batch by batch, so that a machine's load falls on all of them alike; what
counts are ratios to `plain` in the same run. With one thread on a CPU, seconds are those of the process: what a clock
on the wall would show on an idle machine. Every text is compared with plain decoding's.
"""

import json
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch
from measuring import parser

import dlm
from dlm.evaluation.table import markdown
from dlm.models.config import ModelConfig
from dlm.models.draft import Draft

LENGTHS, BATCHES = (2, 4, 8, 15), (1, 4, 16)
SHAPES = {
    "tiny": {
        "hidden_size": 64,
        "num_hidden_layers": 8,
        "heads": (4, 2, 16),
        "intermediate_size": 128,
        "vocab_size": 512,
    },
    "qwen3-8b": {
        "hidden_size": 4096,
        "num_hidden_layers": 36,
        "heads": (32, 8, 128),
        "intermediate_size": 12288,
        "vocab_size": 151936,
    },
}
PUBLISHED_TAU = 6.49
"""Tokens a verification of DFlash on Qwen3-8B (arXiv 2602.06036)."""


def main(argv: list[str] | None = None) -> int:
    words = parser(__doc__)
    words.add_argument("--model", default="pico", help="the target: a causal model's name or folder")
    words.add_argument("--draft", help="a DFlash draft's folder, or a diffusion model's")
    words.add_argument("--prompts", type=Path, help='JSON lines with "question" or "prompt"; default: a few of our own')
    words.add_argument("--count", type=int, default=16, help="prompts")
    words.add_argument("--tokens", type=int, default=64, help="tokens to write")
    words.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    words.add_argument("--batches", type=int, nargs="+", default=BATCHES)
    words.add_argument("--temperature", type=float, default=0.0)
    words.add_argument("--peers", nargs="*", default=(), choices=["transformers"])
    words.add_argument("--peer-path", help="where z-lab's package `dflash` lies")
    words.add_argument("--cost", action="store_true", help="time a step by itself, with random weights")
    words.add_argument("--shape", choices=SHAPES, help="with --cost; default: tiny on a CPU")
    words.add_argument("--threads", type=int, default=1)
    words.add_argument("--json", type=Path)
    words.add_argument("--plot", type=Path)
    options = words.parse_args(argv)
    torch.set_num_threads(options.threads)
    report = cost(options) if options.cost else race(options)
    print(markdown(report["rows"]))
    if options.json is not None:
        options.json.write_text(json.dumps(report, indent=1) + "\n", "utf-8")
    if options.plot is not None:
        plot(report, options.plot)
    return 0


def race(options: Any) -> dict[str, Any]:
    """All contenders over the same prompts."""
    lm = dlm.load(options.model)
    prompts = texts(lm, options)
    settings = {"gen_length": options.tokens, "temperature": options.temperature, "seed": 1}
    rows = []
    for batch in options.batches:
        groups = [prompts[i : i + batch] for i in range(0, len(prompts), batch)]
        contenders = ours(lm, options, batch, settings)
        if batch == 1:
            contenders |= theirs(lm, options)
        rows += turns(contenders, groups, batch, clock_of(lm.device.type))
    threads = torch.get_num_threads()
    return {"model": lm.name, "threads": threads, "torch": torch.__version__, **vars_of(options), "rows": rows}


def vars_of(options: Any) -> dict[str, Any]:
    """The options that matter, without paths."""
    return {name: getattr(options, name) for name in ("tokens", "temperature", "count")}


def texts(lm: dlm.LM, options: Any) -> list[list[int]]:
    """Prompts as ids, through the chat template where there is one."""
    if options.prompts is None:
        said = [f"Write a list of the numbers from {n} to {n + 9}, each with its square." for n in range(options.count)]
    else:
        lines = [json.loads(line) for line in options.prompts.read_text("utf-8").splitlines()[: options.count]]
        said = [line.get("question") or line["prompt"] for line in lines]
    tokenizer = lm.require_tokenizer()
    if getattr(tokenizer, "chat_template", None):
        said = [lm.chat([{"role": "user", "content": text}]) for text in said]
    return [lm.encode(text) for text in said]


def ours(lm: dlm.LM, options: Any, batch: int, settings: dict[str, Any]) -> dict[str, Callable]:
    """Engines that stay, as a server's would: plain, and one for each draft."""

    def engine(draft: Any = None) -> dlm.Engine:
        return dlm.Engine(lm, draft=draft, num_pages=batch * 64, max_num_requests=batch)

    def run(of: dlm.Engine, **more: Any) -> Callable:
        def go(group: list[list[int]]) -> list[dlm.Generation]:
            return of.generate(group, **settings, **more)

        return go

    contenders = {"plain": run(engine())}
    lookup = engine("ngram")
    for length in options.lengths:
        contenders[f"ngram {length}"] = run(lookup, draft_length=min(length, 15))
    contenders["ngram auto"] = run(lookup, draft_length="auto")
    if options.draft is not None:
        draft = engine(options.draft)
        most = draft.batch.drafter.most
        for length in options.lengths:
            if length <= most:
                contenders[f"draft {length}"] = run(draft, draft_length=length)
        contenders["draft auto"] = run(draft, draft_length="auto")
    return contenders


def theirs(lm: dlm.LM, options: Any) -> dict[str, Callable]:
    """transformers' prompt lookup, and z-lab's loop, on the same weights: batch 1."""
    if not options.peers and options.peer_path is None:
        return {}
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).eval()
    sampling = {"do_sample": options.temperature > 0}
    if options.temperature > 0:
        sampling["temperature"] = options.temperature

    def generate(**more: Any) -> Callable:
        def go(group: list[list[int]]) -> list[list[int]]:
            ids = torch.tensor(group)
            with torch.inference_mode():
                out = model.generate(
                    ids, attention_mask=torch.ones_like(ids), max_new_tokens=options.tokens, **sampling, **more
                )
            return [out[0, len(group[0]) :].tolist()]

        return go

    found: dict[str, Callable] = {}
    if "transformers" in options.peers:
        found = {"transformers": generate(), "transformers, prompt lookup": generate(prompt_lookup_num_tokens=10)}
    if options.peer_path is not None and options.draft is not None:
        sys.path.insert(0, options.peer_path)
        from dflash.model import DFlashDraftModel, dflash_generate  # type: ignore[import-not-found]

        peer = DFlashDraftModel.from_pretrained(options.draft, dtype=torch.float32).eval()
        ends = model.generation_config.eos_token_id

        def go(group: list[list[int]]) -> list[list[int]]:
            stop = ends if isinstance(ends, list) else [ends]
            with torch.inference_mode():
                out = dflash_generate(peer, model, torch.tensor(group), options.tokens, stop, options.temperature)
            return [out[0, len(group[0]) :].tolist()]

        found["z-lab"] = go
    return found


def clock_of(device: str) -> Callable[[], float]:
    """The process's own time, where one thread does all of the work; else that on the wall."""
    return time.process_time if device == "cpu" and torch.get_num_threads() == 1 else time.perf_counter


def turns(
    contenders: dict[str, Callable], groups: list[list[list[int]]], batch: int, clock: Callable[[], float]
) -> list[dict[str, Any]]:
    """One row a contender; each group of prompts goes to all of them before the next."""
    seconds: dict[str, list[float]] = defaultdict(list)
    results: dict[str, list[Any]] = defaultdict(list)
    for go in contenders.values():
        go(groups[0])  # warm
    for group in groups:
        for name, go in contenders.items():
            began = clock()
            found = go(group)
            seconds[name].append(clock() - began)
            results[name] += found
    rows = []
    base = [_tokens(result) for result in results["plain"]]
    for name, found in results.items():
        written = [_tokens(result) for result in found]
        ratios = [
            plain / own * _count(written, i, batch) / max(1, _count(base, i, batch))
            for i, (plain, own) in enumerate(zip(seconds["plain"], seconds[name], strict=True))
        ]
        row = {
            "batch": batch,
            "contender": name,
            "tokens/s": round(sum(map(len, written)) / sum(seconds[name]), 1),
            "× plain": round(median(ratios), 2),
            "τ": "",
            "acceptance by position": "",
            "same text": f"{sum(a == b for a, b in zip(written, base, strict=True))} of {len(base)}",
        }
        checks = [result for result in found if getattr(result, "accepted", None)]
        if checks:
            row["τ"] = round(mean(n for result in checks for n in result.accepted), 2)
            row["acceptance by position"] = " ".join(f"{share:.2f}" for share in by_position(checks))
        rows.append(row)
    return rows


def _tokens(result: Any) -> list[int]:
    return list(getattr(result, "tokens", result))


def _count(written: list[list[int]], group: int, batch: int) -> int:
    return sum(map(len, written[group * batch : (group + 1) * batch]))


def by_position(results: list[Any]) -> list[float]:
    """Of each place of a draft: how often it was kept where all before it were."""
    tried, kept = defaultdict(int), defaultdict(int)
    for result in results:
        for drafted, added in zip(result.drafted, result.accepted, strict=True):
            for place in range(min(drafted, added)):
                tried[place] += 1
                kept[place] += place < added - 1
    return [kept[place] / tried[place] for place in sorted(tried) if tried[place] >= 5][:16]


def cost(options: Any) -> dict[str, Any]:
    """Draft and verification against a plain step, with random weights, and the speed-up that a τ would give."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    shape = dict(SHAPES[options.shape or ("qwen3-8b" if device == "cuda" else "tiny")])
    heads, key_heads, head_dim = shape.pop("heads")
    config = ModelConfig(
        model_type="qwen3",
        attention="causal",
        shifted_logits=True,
        qk_norm=True,
        num_attention_heads=heads,
        num_key_value_heads=key_heads,
        head_dim=head_dim,
        **shape,
    )
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    with torch.device(device):
        network = dlm.Transformer(config).to(dtype)
    network.initialise(torch.Generator(device).manual_seed(0))
    lm = dlm.LM(network.eval(), name="random")
    layers, block = (5, 16) if options.shape != "tiny" and device == "cuda" else (2, 16)
    draft = Draft.fresh(lm, num_layers=layers, block_size=block, mask_token_id=config.vocab_size - 1)
    rows, clock = [], clock_of(device)
    for batch in options.batches:
        prompts = [[7 + i, *range(100, 100 + 31)] for i in range(batch)]
        times = {}
        for name, drafter in (("plain", None), ("draft", draft)):
            engine = dlm.Engine(lm, draft=drafter, num_pages=batch * 64, max_num_requests=batch)
            engine.generate(prompts, gen_length=8)
            for i, prompt in enumerate(prompts):
                engine.add_request(prompt, request_id=f"{name}{i}", gen_length=options.tokens)
            steps = []
            while engine.has_work:
                began = clock()
                engine.step()
                if device == "cuda":
                    torch.cuda.synchronize()
                steps.append(clock() - began)
            times[name] = median(steps[4 : len(steps) // 2])
        ratio = times["draft"] / times["plain"]
        rows.append(
            {
                "batch": batch,
                "plain step, ms": round(1e3 * times["plain"], 3),
                f"draft {block - 1} + verify, ms": round(1e3 * times["draft"], 3),
                "cost": round(ratio, 2),
                f"× plain at τ = {PUBLISHED_TAU}": round(PUBLISHED_TAU / ratio, 2),
                "τ to break even": round(ratio, 2),
            }
        )
    where = torch.cuda.get_device_name() if device == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    return {"device": where, "shape": options.shape or ("qwen3-8b" if device == "cuda" else "tiny"), "rows": rows}


def plot(report: dict[str, Any], file: Path) -> None:
    """Speed-up by draft length, a line for each kind of draft and batch."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    lines: dict[tuple[str, int], list[tuple[int, float]]] = defaultdict(list)
    for row in report["rows"]:
        kind, _, length = row.get("contender", "").rpartition(" ")
        if length.isdecimal():
            lines[kind, row["batch"]].append((int(length), row["× plain"]))
    figure, axes = pyplot.subplots()
    for (kind, batch), points in lines.items():
        axes.plot(*zip(*sorted(points), strict=True), marker="o", label=f"{kind}, batch {batch}")
    axes.axhline(1, color="grey", linewidth=1)
    axes.set(xlabel="drafted tokens", ylabel="tokens/s over plain decoding's")
    axes.legend()
    figure.savefig(file)


if __name__ == "__main__":
    raise SystemExit(main())
