"""Speculative decoding: tokens a second, τ and acceptance by position, beside plain exact decoding and others' loops.

    python benchmarks/speculative.py --model smollm2 --draft folder --prompts gsm8k_test.jsonl
    python benchmarks/speculative.py --model folder --peers transformers       # assisted by prompt lookup, batch 1; a bundled
                                        # model first: dlm-export pico-causal --to folder --family qwen3
    python benchmarks/speculative.py --model folder --draft folder --peer-path site-packages-with-dflash
    python benchmarks/speculative.py --no-chat --draft pico-draft --prompts beginnings.jsonl
    python benchmarks/speculative.py --cost --shape smollm2                    # what drafts cost there, random weights

Contenders take turns, prompt by prompt or batch by batch, so that a machine's load falls on all of them alike; what
counts are ratios to `plain` in the same run. With one thread on a CPU, seconds are those of the process: what a clock
on the wall would show on an idle machine. Every text is compared with plain decoding's.
"""

import json
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch
from drafting_cost import SHAPES, clock_of, cost
from measuring import machine, parser, peak_rss

import dlm
from dlm.evaluation.table import markdown

LENGTHS, BATCHES = (2, 4, 8, 15), (1, 4, 16)


def main(argv: list[str] | None = None) -> int:
    words = parser(__doc__)
    words.add_argument("--model", default="pico-causal", help="the target: a causal model's name or folder")
    words.add_argument("--draft", help="a DFlash draft's folder, or a diffusion model's")
    words.add_argument("--prompts", type=Path, help='JSON lines with "question" or "prompt"; default: a few of our own')
    words.add_argument("--no-chat", action="store_true", help="prompts are texts to be continued, not what a user says")
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
    if "transformers" in options.peers and not Path(options.model).is_dir():
        words.error(
            f"--model {options.model}: transformers reads folders; dlm-export {options.model} --to FOLDER makes one"
        )
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
    settings = {"temperature": options.temperature, "seed": 1}
    rows = []
    for batch in options.batches:
        groups = [prompts[i : i + batch] for i in range(0, len(prompts), batch)]
        contenders = ours(lm, options, batch, settings)
        if batch == 1:
            contenders |= theirs(lm, options)
        rows += turns(contenders, groups, batch, clock_of(lm.device.type), options.tokens)
    facts = {"threads": torch.get_num_threads(), **machine(lm.device.type)}
    return {"model": Path(lm.name).name, **vars_of(options), **facts, "peak_bytes": peak_rss(), "rows": rows}


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
    if options.no_chat:
        return [tokenizer.begun(lm.encode(text)) for text in said]
    if getattr(tokenizer, "chat_template", None):
        said = [lm.chat([{"role": "user", "content": text}]) for text in said]
    return [lm.encode(text) for text in said]


def ours(lm: dlm.LM, options: Any, batch: int, settings: dict[str, Any]) -> dict[str, Callable]:
    """Engines that stay, as a server's would: plain, and one for each draft."""

    def engine(draft: Any = None) -> dlm.Engine:
        return dlm.Engine(lm, draft=draft, num_pages=batch * 64, max_num_requests=batch)

    def run(of: dlm.Engine, **more: Any) -> Callable:
        def go(group: list[list[int]], tokens: int) -> list[dlm.Generation]:
            return of.generate(group, gen_length=tokens, **settings, **more)

        return go

    contenders = {"plain": run(engine())}
    lookup = engine("ngram")
    for length in options.lengths:
        contenders[f"ngram {length}"] = run(lookup, draft_length=min(length, 15))
    contenders["ngram auto"] = run(lookup, draft_length="auto")
    if options.draft is not None:
        for kind, given in (("draft", options.draft), ("ngram+draft", f"ngram+{options.draft}")):
            draft = engine(given)
            most = draft.batch.drafter.most
            for length in options.lengths:
                if length <= most:
                    contenders[f"{kind} {length}"] = run(draft, draft_length=length)
            contenders[f"{kind} auto"] = run(draft, draft_length="auto")
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
        def go(group: list[list[int]], tokens: int) -> list[list[int]]:
            ids = torch.tensor(group)
            with torch.inference_mode():
                out = model.generate(
                    ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, **sampling, **more
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

        def go(group: list[list[int]], tokens: int) -> list[list[int]]:
            stop = ends if isinstance(ends, list) else [ends]
            with torch.inference_mode():
                out = dflash_generate(peer, model, torch.tensor(group), tokens, stop, options.temperature)
            return [out[0, len(group[0]) :].tolist()]

        found["z-lab"] = go
    return found


def turns(
    contenders: dict[str, Callable],
    groups: list[list[list[int]]],
    batch: int,
    clock: Callable[[], float],
    tokens: int,
) -> list[dict[str, Any]]:
    """One row a contender; each group of prompts goes to all of them before the next."""
    seconds: dict[str, list[float]] = defaultdict(list)
    results: dict[str, list[Any]] = defaultdict(list)
    for go in contenders.values():
        go(groups[0], min(8, tokens))  # warm
    for group in groups:
        for name, go in contenders.items():
            began = clock()
            found = go(group, tokens)
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
