"""How far a drawn likelihood bound lies from the exact one, and how often its interval holds it.

    python benchmarks/estimators.py                                   # ours, on `pico` and held-out Python
    python benchmarks/estimators.py --llada LLaDA/eval_llada.py --dream Dream/eval/eval.py     # the published ones beside it

The model runs once on every set of masked tokens of a span, which gives the exact bound; each estimator then draws among
these results in place of running the model. The published code is read from your copies and run as it stands.
"""

import ast
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from measuring import RESULTS, machine, parser, write
from torch.nn import functional

import dlm
from dlm.data.lines import STDLIB, heldout_lines
from dlm.evaluation.draws import Span, plan_of
from dlm.evaluation.likelihood import masked_costs
from dlm.evaluation.table import markdown

CASES = ((4, 8), (6, 8), (6, 16), (6, 32), (8, 8), (8, 16), (8, 32))
"""Tokens of a span, and draws."""
GIVEN = 24
MASK = -1
Table = np.ndarray
"""(sets of masked tokens, tokens): the cross-entropy of each token, 0 where it is not masked; set number in binary."""


def spans(lm: dlm.LM, tokens: int, count: int) -> Iterator[tuple[Table, float]]:
    """Held-out lines of Python: all that the model can be asked of their first tokens, and the exact bound."""
    found = 0
    for line in heldout_lines(STDLIB, 4 * count, 0):
        before, answer = lm.encode(line.prefix)[-GIVEN:], lm.encode(line.line)[:tokens]
        if len(answer) < tokens or found == count:
            continue
        found += 1
        plan = plan_of(Span(tuple(before + answer), tokens, 0), None, 2**tokens, 0)
        table = np.zeros((2**tokens, tokens))
        costs = masked_costs(lm, plan, range(len(plan.masks)))
        for mask, cost in zip(plan.masks, costs, strict=True):
            table[number(mask)] = cost
        yield table, float((plan.weights * np.array(costs)).sum())


def number(mask: Any) -> int:
    return int((np.asarray(mask, int) << np.arange(len(mask))).sum())


def ours(table: Table, draws: int, address: int, seed: int) -> tuple[float, float, float, float]:
    """The estimate, its interval, and its error."""
    plan = plan_of(Span(tuple(range(table.shape[1])), table.shape[1], address), None, draws, seed, most=0)
    plan.costs += [table[number(mask)] for mask in plan.masks]
    found = plan.result()
    return found.nats, *found.interval, found.error


def published(file: Path, name: str, draws: int) -> Callable[[Table], float]:
    """A method of published evaluation code, run over the table in place of a model; its own random numbers are torch's."""
    tree = ast.parse(file.read_text("utf-8"))
    wanted = {"_forward_process", name}
    methods = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name in wanted]
    space: dict[str, Any] = {"torch": torch, "F": functional}
    exec(compile(ast.Module([*methods], []), str(file), "exec"), space)
    own = SimpleNamespace(batch_size=draws, mc_num=draws, device="cpu", mask_id=MASK, sampling_eps=1e-3, log_type="ftb")
    own.tokenizer = SimpleNamespace(mask_token_id=MASK)
    own._forward_process = lambda *arguments: space["_forward_process"](own, *arguments)

    def estimate(table: Table) -> float:
        tokens = table.shape[1]

        def logits(batch: torch.Tensor, prompt: torch.Tensor) -> torch.Tensor:
            """Two tokens, 0 true: its logit is such that its cross-entropy is the table's."""
            shown = torch.zeros(*batch.shape, 2, dtype=torch.float64)
            masked = (batch == MASK)[:, 1 : 1 + tokens].numpy()
            cost = np.maximum(np.array([table[number(row)] for row in masked]), 1e-12)
            shown[:, 1 : 1 + tokens, 1] = torch.from_numpy(
                np.where(cost > 30, cost, np.log(np.expm1(np.minimum(cost, 30))))
            )
            return shown

        own.get_logits = logits
        # Dream always shows the last token, end-of-text: one more than the span.
        answer = torch.zeros(tokens + ("nll" in name), dtype=torch.long)
        return abs(float(space[name](own, torch.zeros(1, dtype=torch.long), answer)))

    return estimate


def main(argv: list[str] | None = None) -> int:
    words = parser(__doc__)
    words.add_argument("--model", default="pico")
    words.add_argument("--spans", type=int, default=100, help="of each length (100)")
    words.add_argument("--repeats", type=int, default=10, help="estimates of each span (10)")
    words.add_argument("--llada", type=Path, help="LLaDA's eval_llada.py")
    words.add_argument("--dream", type=Path, help="Dream's eval/eval.py")
    words.add_argument("--output", type=Path, default=RESULTS, help="folder of the JSON file")
    options = words.parse_args(argv)
    lm = dlm.load(options.model, dtype="float32")
    tables = {n: list(spans(lm, n, options.spans)) for n in dict.fromkeys(tokens for tokens, _ in CASES)}
    others = {"LLaDA": (options.llada, "get_loglikelihood"), "Dream": (options.dream, "_eval_target_nll_mc")}
    rows = []
    for tokens, draws in CASES:
        seeds = range(options.repeats)
        found = [[ours(table, draws, i, seed) for seed in seeds] for i, (table, _) in enumerate(tables[tokens])]
        truth = np.array([exact for _, exact in tables[tokens]])[:, None]
        nats, low, high, error = np.moveaxis(np.array(found), 2, 0)
        row: dict[str, Any] = {"tokens": tokens, "draws": draws, **_row("ours", nats - truth)}
        row["covered"] = f"{100 * ((low <= truth) & (truth <= high)).mean():.1f} %"
        near = abs(nats - truth) <= 3 * error
        row["near"] = f"{int(near[:, 0].sum())} of {len(truth)}; {100 * near.mean():.1f} % of all"
        for name, (file, method) in others.items():
            if file is not None:
                torch.manual_seed(0)
                estimate = published(file, method, draws)
                values = [[estimate(table) for _ in range(options.repeats)] for table, _ in tables[tokens]]
                row |= _row(name, np.array(values) - truth)
        rows.append(row)
        print(row, flush=True)
    names = {
        "tokens": "tokens",
        "draws": "draws",
        "covered": "95 % intervals that hold",
        "near": "within 3 errors: the first estimate of each span, and all",
    }
    print(markdown(rows, names | {key: key for key in rows[0] if key not in names}))
    facts = {"machine": machine(), "model": options.model, "spans": options.spans, "repeats": options.repeats}
    write(options.output / "estimators.json", {**facts, "rows": rows})
    return 0


def _row(name: str, off: np.ndarray) -> dict[str, str]:
    """Spread of the estimates of one span, and their bias, in nats; means over the spans."""
    error = off.mean(1).std() / len(off) ** 0.5
    return {name: f"{off.std(1).mean():.2f}", f"bias of {name}": f"{off.mean():+.2f} ± {error:.2f}"}


if __name__ == "__main__":
    raise SystemExit(main())
