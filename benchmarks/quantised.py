"""What rounding the weights costs a model: its logits and its tokens beside those of the same model in fp32.

`python benchmarks/quantised.py` writes a JSON of every kind of weights that this machine can compute with, and prints a
table. Logits are those of all masks after half a passage of Python's own library, by an engine as it decodes: in one step,
so that every kind is asked the same. Tokens are decoded greedily, one a step.
"""

import argparse
import inspect
import json
import platform
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import dlm
from dlm.errors import UserError
from dlm.inference.recipe import Recipe
from dlm.models.weight_only import parts

KINDS: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16": {"dtype": "bfloat16"},
    "q8": {"quantize": "q8"},
    "torchao-fp8": {"quantize": "torchao-fp8"},
    "torchao-int8": {"quantize": "torchao-int8"},
    "torchao-int4": {"quantize": "torchao-int4"},
    "int8": {"quantize": "int8"},
    "nf4": {"quantize": "nf4"},
}
MODULES = ("argparse", "textwrap", "json.decoder", "statistics", "shlex", "heapq", "csv", "configparser")


@contextmanager
def listening(into: list[Tensor]) -> Iterator[None]:
    """Keep the logits that engines decide by."""
    original = Recipe.logits

    def logits(self: Recipe, *args: Any) -> Tensor:
        found = original(self, *args)
        into.append(found.detach().float().cpu())
        return found

    Recipe.logits = logits  # type: ignore[method-assign]
    try:
        yield
    finally:
        Recipe.logits = original  # type: ignore[method-assign]


def passages(count: int, characters: int) -> list[str]:
    """Pieces of Python's own library, spread over the modules."""
    texts = [inspect.getsource(__import__(name, fromlist=["_"])) for name in MODULES]
    return [
        text[start : start + characters]
        for number in range(count)
        for text in [texts[number % len(texts)]]
        for start in [(number // len(texts) + 1) * characters * 3 % max(1, len(text) - characters)]
    ]


def measured(lm: dlm.LM, prompts: list[str], length: int) -> tuple[Tensor, list[list[int]]]:
    """Log-probabilities of all masks in one step, (prompts × length, vocabulary), and the tokens of a whole decode."""
    found: list[Tensor] = []
    whole: dict[str, Any] = {"gen_length": length, "block_length": length}
    with listening(found):
        for prompt in prompts:
            dlm.generate(lm, prompt, steps=1, **whole)
    texts = dlm.generate(lm, prompts, steps=length, **whole)
    return torch.cat(found).log_softmax(-1), [result.tokens for result in texts]


def compared(
    kind: str, lm: dlm.LM, found: tuple[Tensor, list[list[int]]], exact: tuple[Tensor, list[list[int]]]
) -> dict:
    """A row of the table."""
    (logs, texts), (truth, sure) = found, exact
    seen = truth.isfinite() & logs.isfinite()  # a mask is never chosen
    kl = torch.where(seen, truth.exp() * (truth - logs), 0).sum(-1)
    pairs = [(a, b) for one, other in zip(texts, sure, strict=True) for a, b in zip(one, other, strict=False)]
    compute = dlm.Engine(lm, num_pages=8).batch.stepper.compute
    weights = [part for x in lm.network.parameters() for part in parts(x)]
    return {
        "kind": kind,
        "computed_by": "C" if compute.fused is not None else "torch",
        "mebibytes": sum(x.numel() * x.element_size() for x in weights) / 2**20,
        "kl_nats": float(kl.mean()),
        "kl_nats_p99": float(kl.quantile(0.99)),
        "same_choice": float((logs.argmax(-1) == truth.argmax(-1)).float().mean()),
        "same_token_decoded": sum(a == b for a, b in pairs) / max(1, sum(map(len, sure))),
        "same_text": sum(a == b for a, b in zip(texts, sure, strict=True)) / len(sure),
    }


def table(result: dict) -> str:
    """Markdown of the rows."""
    lines = [
        "| weights | computed by | MiB | KL, nats (99th percentile) | same choice | same token decoded | same text |"
    ]
    lines += ["|---|---|---|---|---|---|---|"]
    for row in result["rows"]:
        if "refused" in row:
            lines.append(f"| {row['kind']} | refused: {row['refused']} | | | | | |")
            continue
        lines.append(
            f"| {row['kind']} | {row['computed_by']} | {row['mebibytes']:.2f} | {row['kl_nats']:.2e} ({row['kl_nats_p99']:.2e}) | "
            f"{row['same_choice']:.2%} | {row['same_token_decoded']:.2%} | {row['same_text']:.1%} |"
        )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="pico", help="what dlm.load takes")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--characters", type=int, default=160, help="of a prompt")
    parser.add_argument("--length", type=int, default=32, help="tokens that are filled")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/quantised-pico.json"))
    args = parser.parse_args()
    prompts, rows, exact = passages(args.prompts, args.characters), [], None
    for kind, more in KINDS.items():
        try:
            lm = dlm.load(args.model, device=args.device, **{"dtype": "float32"} | more)
        except UserError as error:
            rows.append({"kind": kind, "refused": str(error).splitlines()[0]})
            continue
        found = measured(lm, prompts, args.length)
        exact = exact or found
        rows.append(compared(kind, lm, found, exact))
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    result = {
        "command": " ".join(["python", "benchmarks/quantised.py", *sys.argv[1:]]),
        "model": args.model,
        "device": args.device,
        "machine": platform.machine(),
        "versions": {name: _version(name) for name in ("torch", "torchao", "bitsandbytes")},
        "positions": args.prompts * args.length,
        "rows": rows,
    }
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    args.out.with_suffix(".md").write_text(
        f"`{result['command']}`: {result['positions']} masked positions\n\n{table(result)}\n"
    )
    print(table(result))
    return 0


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


if __name__ == "__main__":
    raise SystemExit(main())
