"""Did a change of the code change a token? Decode a fixed set of requests in two checkouts, and compare.

    python benchmarks/tokens.py record old.json      # in the one checkout
    python benchmarks/tokens.py record new.json      # in the other
    python benchmarks/tokens.py compare old.json new.json

`record` makes tiny random models of every family, the same in each checkout, and decodes with every rule, cache and
strategy: alone and in a crowd, guided, drawn, edited, open-ended, with stop strings, into holes, in fp32 and bf16. It
writes what came out of each request, under a name that says what it was. `compare` counts the differences of each group
and prints them; its exit status is 1 if there are any. DLM_NATIVE=0 before `record` has torch compute instead of C.
"""

import json
import platform
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from checkpoints import BIDIRECTIONAL, BLOCKS, CAUSAL, MASK, MODELS, write_model
from measuring import parser, write

import dlm

STEPPED = ("low_confidence", "random", "margin", "entropy")  # rules that follow `steps`
RULES: dict[str, dict[str, Any]] = {  # each with the settings that it reads
    **{rule: {} for rule in STEPPED},
    "threshold": {"threshold": 0.5},
    "factor": {"factor": 0.9},
    "entropy_bound": {"gamma": 0.5},
    "entropy_threshold": {"entropy_threshold": 1.0},
    "hierarchical": {"threshold": 0.8, "tau_low": 0.3},
    "credit": {"threshold": 0.5},
}
DRAWS: dict[str, dict[str, Any]] = {
    "t0.7": {"temperature": 0.7},
    "t1 k20": {"temperature": 1.0, "top_k": 20},
    "t1 p0.8": {"temperature": 1.0, "top_p": 0.8},
    "t1.3 k50 p0.9": {"temperature": 1.3, "top_k": 50, "top_p": 0.9, "num_samples": 2},
}
REVISIONS: dict[str, dict[str, Any]] = {
    "remask": {"remask_threshold": 0.4},
    "edit": {"edit_threshold": 0.3, "max_post_edit_steps": 3},
    "both": {"remask_threshold": 0.3, "edit_threshold": 0.5, "max_post_edit_steps": 4},
}
TALK = [{"role": role, "content": text} for role, text in (("user", "Hi"), ("assistant", "Yes?"), ("user", "?"))]
FIELDS = ("tokens", "steps", "nfe", "finish_reason", "text")


def main(argv: list[str] | None = None) -> int:
    words = parser(__doc__)
    commands = words.add_subparsers(dest="command", required=True)
    commands.add_parser("record", help="decode everything, write what came out").add_argument("output", type=Path)
    comparing = commands.add_parser("compare", help="what differs between two such files")
    comparing.add_argument("old", type=Path)
    comparing.add_argument("new", type=Path)
    options = words.parse_args(argv)
    return record(options.output) if options.command == "record" else compare(options.old, options.new)


def ids(seed: int, length: int) -> list[int]:
    return torch.randint(32, 127, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def holes(seed: int) -> list[int]:
    return [*ids(seed, 3 + seed % 4), *[MASK] * 5, *ids(seed + 50, 1 + seed % 5), *[MASK] * (1 + seed % 3), 65]


def shape(name: str, rule: str = "low_confidence") -> dict[str, Any]:
    """Lengths of a continuation, and steps where the rule counts them."""
    if name in CAUSAL:
        return {"gen_length": 12}
    blocks = {"gen_length": 16} | ({} if name in BLOCKS else {"block_length": 8})
    return blocks | ({"steps": 8} if rule in STEPPED else {})


def ruled(name: str, rule: str) -> dict[str, Any]:
    return {**shape(name, rule), "rule": rule, **RULES[rule]}


def caches(name: str) -> dict[str, dict[str, Any]]:
    """Every cache that the family allows."""
    if name not in BIDIRECTIONAL:
        return {"none": {"cache": "none"}, "exact": {"cache": "exact", "page_size": 4}}
    found: dict[str, dict[str, Any]] = {kind: {"cache": kind} for kind in ("none", "prefix", "dual")}
    refreshed = {"refresh_interval": 3, "cache_delay": 2, "page_size": 8}
    return found | {f"{kind} refreshed": {"cache": kind, **refreshed} for kind in ("prefix", "dual")}


class Recorder:
    """Calls by name, and their results."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.results = folder, dict[str, dict[str, Any]]()
        self.load = cache(self._load)
        self.generate, self.infill = partial(self._call, dlm.generate), partial(self._call, dlm.infill)

    def _load(self, name: str, dtype: str = "float32") -> Any:
        if name not in MODELS:
            return dlm.load(name, dtype=dtype, device="cpu")
        folder = self.folder / name
        return dlm.load(folder if folder.is_dir() else write_model(name, folder), dtype=dtype, device="cpu")

    def note(self, name: str, results: Callable[[], Iterable[Any]]) -> None:
        try:
            for number, result in enumerate(results()):
                key = f"{name} #{number}"
                assert key not in self.results, key
                self.results[key] = {field: getattr(result, field) for field in FIELDS}
        except dlm.UserError as error:
            self.results[name] = {"error": str(error)}

    def _call(self, function: Any, name: str, model: str, prompts: Any, **settings: Any) -> None:
        dtype = settings.pop("dtype", "float32")
        self.note(name, lambda: function(self.load(model, dtype), prompts, **settings))

    def engine(self, name: str, model: str, requests: list[tuple[int, Any, dict[str, Any]]], **settings: Any) -> None:
        """Requests that join a running engine, each after so many of its steps."""

        def results() -> Iterator[Any]:
            engine = dlm.Engine(self.load(model), **settings)
            waiting, ended, step = dict(enumerate(requests)), dict[str, Any](), 0
            while waiting or engine.has_work:
                for number in [number for number, (due, *_) in waiting.items() if due <= step]:
                    _, prompt, given = waiting.pop(number)
                    engine.add_request(prompt, request_id=str(number), **given)
                ended |= {event.request_id: event.result for event in engine.step() if event.result is not None}
                step += 1
            return iter([ended[str(number)] for number in range(len(requests))])

        self.note(name, results)


def everything(to: Recorder) -> Iterator[str]:
    """All requests; yields each group's name when it is done."""
    for name in MODELS:
        for rule in RULES:
            to.generate(f"rules / {name} / {rule}", name, [ids(1, 9), ids(2, 14)], **ruled(name, rule))
    yield "rules"
    for name in MODELS:
        for kind, cached in caches(name).items():
            given = ruled(name, "threshold") | cached
            to.generate(f"caches / {name} / {kind}", name, [ids(3, 5), ids(4, 21), ids(5, 11)], **given)
            if name not in CAUSAL:
                given |= {"strategy": "multi_block", "max_active_blocks": 3, "block_add": 0.4}
                to.generate(f"multi_block / {name} / {kind}", name, [ids(6, 7), ids(7, 18)], **given)
    for rule in ("low_confidence", "entropy", "credit", "hierarchical"):
        given = ruled("llada", rule) | {"strategy": "multi_block", "max_active_blocks": 2, "block_add": 0.1}
        to.generate(f"multi_block / llada / {rule}", "llada", [ids(6, 7), ids(7, 18)], **given)
    yield "caches, multi_block"
    for name in MODELS:
        for draw, given in DRAWS.items():
            given = ruled(name, "random" if "k20" in draw else "threshold") | given | {"seed": 5}
            to.generate(f"draws / {name} / {draw}", name, [ids(8, 6)], **given)
        for kind, cached in caches(name).items():
            given = shape(name) | cached | {"cfg_scale": 0.7}
            to.generate(f"guided / {name} / {kind}", name, [ids(9, 8)], **given)
    drawn = shape("llada") | {"cfg_scale": 1.5, "temperature": 0.8}
    to.generate("guided / llada / drawn", "llada", [ids(9, 8)], **drawn)
    yield "draws, guided"
    for name in (*BIDIRECTIONAL, *BLOCKS):
        for kind, revised in REVISIONS.items():
            for cache_name in ("none", "dual refreshed" if name in BIDIRECTIONAL else "exact"):
                given = ruled(name, "threshold") | revised | caches(name)[cache_name]
                given |= {"strategy": "multi_block", "max_active_blocks": 2} if kind == "both" else {}
                to.generate(f"revised / {name} / {kind}, {cache_name}", name, [ids(10, 7)], **given)
    yield "revised"
    for name in MODELS:
        auto = {"gen_length": "auto", "max_gen_length": 24}
        auto |= {} if name in CAUSAL else {"steps": 2} | ({} if name in BLOCKS else {"block_length": 4})
        to.generate(f"auto / {name}", name, ["Once upon", "a time"], **auto)
        stop = {"stop": [*"acegikmo ", "No"]}
        to.generate(f"stop / {name}", name, ["One day", "The end"], **shape(name), **stop)
        given = shape(name) | ({} if name in CAUSAL else {"rule": "margin"})
        to.generate(f"chat / {name}", name, TALK, **given)
    yield "auto, stop, chat"
    for name in MODELS:
        for kind, cached in caches(name).items():
            to.infill(f"infill / {name} / {kind}", name, [holes(1), holes(2)], steps=4, **cached)
        to.infill(f"infill / {name} / blocks", name, [holes(3)], block_length=3, rule="threshold", threshold=0.5)
        text = "He said [MASK:4] and [MASK:2]."
        to.infill(f"infill / {name} / text", name, [text], temperature=0.5, steps=3)
    to.infill("infill / llada / ranges", "llada", ["It was [MASK:2-5] and [MASK:1-3]!"], steps=4)
    to.infill("infill / sdar / ranges", "sdar", ["It was [MASK:2-5]!"], steps=4)
    to.infill("infill / Dream / revised", "Dream", [holes(4)], steps=4, remask_threshold=0.5)
    to.infill("infill / llada / guided", "llada", [holes(5)], steps=4, cfg_scale=0.5)
    yield "infill"
    for name in MODELS:
        crowd = [(2 * (i // 3), ids(20 + i, 4 + 5 * i % 17), ruled(name, "threshold") | {"seed": i}) for i in range(6)]
        crowd.append((1, ids(30, 6), ruled(name, "margin") | {"temperature": 0.6}))
        crowd.append((4, ids(20, 4) + ids(31, 3), ruled(name, "random") | {"cfg_scale": 0.4}))
        crowd.append((3, holes(6), {"infill": True, "steps": 4}))
        for kind, cached in caches(name).items():
            to.engine(f"crowd / {name} / {kind}", name, crowd, **cached)
        pool = {"page_size": 4, "num_pages": 14, "max_num_requests": 6}
        pool |= {"cache": "dual" if name in BIDIRECTIONAL else "exact"}
        grown = {"gen_length": "auto", "max_gen_length": 32} | ({"block_length": 8} if name in BIDIRECTIONAL else {})
        late = [(i // 2, ids(40 + i, 5 + i), {**grown, **({} if name in CAUSAL else {"steps": 3})}) for i in range(4)]
        to.engine(f"parked / {name}", name, crowd + late, **pool)
    yield "crowd, parked"
    for name in MODELS:
        for rule in ("low_confidence", "threshold", "entropy"):
            given = ruled(name, rule) | {"dtype": "bfloat16"}
            to.generate(f"bf16 / {name} / {rule}", name, [ids(11, 9), ids(12, 13)], **given)
        given = ruled(name, "threshold") | {"dtype": "bfloat16", "deterministic": True}
        to.generate(f"bf16 / {name} / deterministic", name, [ids(11, 9), ids(12, 13)], **given)
    yield "bf16"
    for rule in RULES:
        given = {"rule": rule, **RULES[rule], "gen_length": 32, "block_length": 16}
        to.generate(f"bundled / pico / {rule}", "pico", ["Once upon a time", "The"], **given)
    to.generate("bundled / pico / dual", "pico", ["Once upon a time"], gen_length=32, steps=8, cache="dual")
    to.infill("bundled / pico / holes", "pico", ["Once upon a [MASK:2], there was [MASK:3-5]."], steps=8)
    yield "bundled"


def record(output: Path) -> int:
    torch.set_num_threads(1)
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        to = Recorder(Path(folder))
        for group in everything(to):
            print(f"{time.perf_counter() - started:6.1f} s  {len(to.results):5} results  {group}", flush=True)
    machine = {"torch": torch.__version__, "cpu": torch.backends.cpu.get_cpu_capability(), "os": platform.platform()}
    write(output, {"machine": machine, "results": to.results})
    failed = [f"{name}: {result['error']}" for name, result in to.results.items() if "error" in result]
    print("\n".join([*failed, f"{len(to.results)} results, {len(failed)} errors"]))
    return 1 if failed else 0


def compare(old: Path, new: Path) -> int:
    before, after = (json.loads(path.read_text("utf-8")) for path in (old, new))
    for key in sorted(before["machine"].keys() | after["machine"].keys()):
        if (a := before["machine"].get(key)) != (b := after["machine"].get(key)):
            print(f"note: {key} was {a} and is {b}")
    total, differing = Counter(), Counter()
    for name in dict.fromkeys([*before["results"], *after["results"]]):
        a, b = before["results"].get(name), after["results"].get(name)
        group = name.split(" / ")[0]
        total[group] += 1
        differing[group] += a != b
        if a is None or b is None:
            print(f"{name}: only in {new if a is None else old}")
            continue
        for field in sorted(a.keys() | b.keys()):
            if a.get(field) != b.get(field):
                print(f"{name}: {field}\n  {a.get(field)!r}\n  {b.get(field)!r}")
    for group in total:
        print(f"{group:12} {total[group]:5} results, {differing[group]} differ")
    print(f"{total.total()} results, {differing.total()} differ")
    return 1 if differing.total() else 0


if __name__ == "__main__":
    sys.exit(main())
