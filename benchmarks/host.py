"""What a step costs the host: CPU time with the network and everything that a GPU would compute left out.

    python benchmarks/host.py                                  # milliseconds a step, and benchmarks/results/host.json
    python benchmarks/host.py --profile "sdar 4" --batch 64    # where they go
    PYTHONPATH=OLD python benchmarks/host.py --output old.json # the same of another checkout

The network's states and logits are made once and handed out again. "launched" steps decide on the CPU, which stands for
launching the decision's kernels; in "recorded" steps a graph would do it, so its time is taken out. The tokens of both are the same.
"""

import argparse
import cProfile
import pstats
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from measuring import RESULTS, machine, parser, write

import dlm
from dlm.models import LM, ModelConfig, Transformer

SDAR: dict[str, Any] = {"model_type": "sdar", "attention": "block_causal"}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    # model, engine, request
    "llada dual": ({"model_type": "llada"}, {"cache": "dual"}, {"gen_length": 96, "block_length": 32, "steps": 96}),
    "sdar 4": ({**SDAR, "block_length": 4}, {}, {"gen_length": 96, "block_length": 4, "steps": 96}),
    "sdar 32": ({**SDAR, "block_length": 32}, {}, {"gen_length": 96, "block_length": 32, "steps": 96}),
}


def main(argv: list[str] | None = None) -> int:
    options = _options(argv)
    torch.set_num_threads(1)
    report: dict[str, Any] = {"machine": machine(), "milliseconds": {}}
    for name in CASES if options.profile is None else [options.profile]:
        for batch in options.batch:
            for kind in ("launched", "recorded"):
                if kind == "recorded" and not _records():
                    continue
                taken = Case(name, batch, kind).milliseconds(options.rounds, options.profile is not None)
                report["milliseconds"][f"{name}, {batch}, {kind}"] = taken
                print(f"{name:12s} {batch:3d} requests  {kind:9s} {taken:7.3f} ms", flush=True)
    if options.output is not None:
        write(options.output, report)
    return 0


def _options(argv: list[str] | None) -> argparse.Namespace:
    words = parser(__doc__)
    words.add_argument("--batch", type=int, nargs="+", default=[1, 8, 64], help="requests at a time (1 8 64)")
    words.add_argument("--rounds", type=int, default=3, help="decodes of each, of which the best counts (3)")
    words.add_argument("--profile", choices=list(CASES), help="one case, with a table of its functions")
    words.add_argument("--output", type=Path, help="the JSON file")
    options = words.parse_args(argv)
    if options.output is None and options.profile is None:
        options.output = RESULTS / "host.json"
    return options


def _records() -> bool:
    try:
        import dlm.inference.graphs  # noqa: F401
    except ImportError:
        return False
    return True


class Case:
    """An engine whose network answers at once."""

    def __init__(self, name: str, batch: int, kind: str) -> None:
        model, engine, self.request = CASES[name]
        shape = {"vocab_size": 32, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
        shape |= {"num_key_value_heads": 1, "head_dim": 8, "intermediate_size": 8, "max_position_embeddings": 1024}
        config = ModelConfig(**shape, mask_token_id=31, mask_in_softmax=True, **model)
        self.lm = LM(Transformer(config).eval(), None, "instant")
        self.away = 0.0
        self.engine = dlm.Engine(self.lm, num_pages=64 * batch, kernels="torch", max_num_tokens=65536, **engine)
        states, logits = torch.zeros(65536, 8), torch.randn(65536, 32)
        self.lm.network.hidden = self._apart(lambda ids, *_, output_rows=None, **__: states[: len(ids if output_rows is None else output_rows)])  # type: ignore[method-assign]  # fmt: skip
        self.lm.network.head = self._apart(lambda hidden: logits[: len(hidden)].clone())  # type: ignore[method-assign]
        if kind == "recorded":
            from dlm.inference.graphs import Graphs

            compute = self.engine.batch.stepper.compute
            compute.graphs = Graphs(self.lm.network, compute.path, False, self._capture)
            compute.graphs._program = self._apart(compute.graphs._program)  # type: ignore[method-assign]
        self.prompts = [[i % 30] * (40 + i % 7) for i in range(batch)]

    def milliseconds(self, rounds: int, profiled: bool) -> float:
        """CPU time of a step, without what a device does."""
        self.decode()
        profile = cProfile.Profile()
        if profiled:
            profile.enable()
        best = min(self.decode() for _ in range(rounds))
        if profiled:
            profile.disable()
            pstats.Stats(profile, stream=sys.stdout).sort_stats("tottime").print_stats(28)
        return best

    def decode(self) -> float:
        for prompt in self.prompts:
            self.engine.add_request(prompt, **self.request)
        before, self.away, start = self.engine.stats().nfe, 0.0, time.process_time()
        while self.engine.has_work:
            self.engine.step()
        taken = time.process_time() - start - self.away
        return 1e3 * taken / (self.engine.stats().nfe - before)

    def _capture(self, run: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        """A graph that computes anew, its time put aside."""
        result = run()
        return self._apart(lambda: result.copy_(run())), result

    def _apart(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """The same, its time put aside."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            start, before = time.process_time(), self.away
            found = run(*args, **kwargs)
            self.away = before + time.process_time() - start
            return found

        return timed


if __name__ == "__main__":
    raise SystemExit(main())
