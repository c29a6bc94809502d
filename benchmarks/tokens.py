"""Did a change of the code change a token? Decode a fixed set of requests in two checkouts, and compare.

    python benchmarks/tokens.py record old.json      # in the one checkout
    python benchmarks/tokens.py record new.json      # in the other
    python benchmarks/tokens.py compare old.json new.json

`record` makes tiny random models of every family, the same in each checkout, and decodes with every rule, cache and
strategy: alone and in a crowd, guided, drawn, edited, open-ended, with stop strings, into holes, in fp32 and bf16. It
writes what came out of each request, under a name that says what it was. `compare` counts the differences of each group
and prints them; its exit status is 1 if there are any. DLM_NATIVE=0 before `record` has torch compute instead of C.
"""

import argparse
import json
import platform
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch
from checkpoints import MASK, MODELS, write_model

import dlm

BIDIRECTIONAL = ("dlm", "dlm-moe", "dlm-learned", "llada", "llada_moe", "Dream")
BLOCKS = ("dlm-block", "sdar", "llada2_moe", "Fast_dLLM_Qwen")
CAUSAL = ("qwen2", "qwen3", "llama")
RULES: dict[str, dict[str, Any]] = {  # with what each reads; the first four follow `steps`
    "low_confidence": {},
    "random": {},
    "margin": {},
    "entropy": {},
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
FIELDS = ("tokens", "steps", "nfe", "finish_reason", "text")
Result = dict[str, Any]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("record", help="decode everything, write what came out").add_argument("output", type=Path)
    comparing = commands.add_parser("compare", help="what differs between two such files")
    comparing.add_argument("old", type=Path)
    comparing.add_argument("new", type=Path)
    options = parser.parse_args(argv)
    return record(options.output) if options.command == "record" else compare(options.old, options.new)


# --- requests ----------------------------------------------------------------------------------------------------------


def ids(seed: int, length: int) -> list[int]:
    return torch.randint(32, 127, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def holes(seed: int) -> list[int]:
    return [*ids(seed, 3 + seed % 4), *[MASK] * 5, *ids(seed + 50, 1 + seed % 5), *[MASK] * (1 + seed % 3), 65]


def shape(name: str, rule: str = "low_confidence") -> dict[str, Any]:
    """Lengths of a continuation, and steps where the rule counts them."""
    if name in CAUSAL:
        return {"gen_length": 12}
    blocks = {"gen_length": 16} | ({} if name in BLOCKS else {"block_length": 8})
    return blocks | ({"steps": 8} if list(RULES).index(rule) < 4 else {})


def ruled(name: str, rule: str) -> dict[str, Any]:
    return {**shape(name, rule), "rule": rule, **RULES[rule]}


def caches(name: str) -> dict[str, dict[str, Any]]:
    """Every cache that the family allows."""
    if name not in BIDIRECTIONAL:
        return {"none": {"cache": "none"}, "exact": {"cache": "exact", "page_size": 4}}
    found: dict[str, dict[str, Any]] = {"none": {"cache": "none"}}
    for kind in ("prefix", "dual"):
        found[kind] = {"cache": kind}
        found[f"{kind} refreshed"] = {"cache": kind, "refresh_interval": 3, "cache_delay": 2, "page_size": 8}
    return found


class Recorder:
    """Calls, each under its name, and what came out of them."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.results = folder, dict[str, Result]()
        self.load = cache(self._load)

    def _load(self, name: str, dtype: str = "float32") -> Any:
        if name not in MODELS:
            return dlm.load(name, dtype=dtype, device="cpu")
        folder = self.folder / name
        return dlm.load(folder if folder.is_dir() else write_model(name, folder), dtype=dtype, device="cpu")

    def note(self, name: str, results: Iterable[Any]) -> None:
        for number, result in enumerate(results):
            key = f"{name} #{number}"
            assert key not in self.results, key
            self.results[key] = {field: getattr(result, field) for field in FIELDS}

    def call(self, name: str, function: Any, model: str, prompts: Any, **settings: Any) -> None:
        dtype = settings.pop("dtype", "float32")
        try:
            self.note(name, function(self.load(model, dtype), prompts, **settings))
        except dlm.UserError as error:
            self.results[name] = {"error": str(error)}

    def engine(self, name: str, model: str, requests: list[tuple[int, Any, dict[str, Any]]], **settings: Any) -> None:
        """Requests that join a running engine, each after so many of its steps; what has ended differently ends here."""
        try:
            engine = dlm.Engine(self.load(model), **settings)
            waiting, results, step = list(enumerate(requests)), dict[str, Any](), 0
            while waiting or engine.has_work:
                for entry in [entry for entry in waiting if entry[1][0] <= step]:
                    waiting.remove(entry)
                    number, (_, prompt, given) = entry
                    engine.add_request(prompt, request_id=str(number), **given)
                events = engine.step()
                results |= {event.request_id: event.result for event in events if event.result is not None}
                step += 1
            self.note(name, [results[str(number)] for number in range(len(requests))])
        except dlm.UserError as error:
            self.results[name] = {"error": str(error)}


def everything(to: Recorder) -> Iterator[str]:
    """All requests; yields each group's name when it is done."""
    for name in MODELS:
        for rule in RULES:
            to.call(f"rules / {name} / {rule}", dlm.generate, name, [ids(1, 9), ids(2, 14)], **ruled(name, rule))
    yield "rules"
    for name in MODELS:
        for kind, cached in caches(name).items():
            given = ruled(name, "threshold") | cached
            to.call(f"caches / {name} / {kind}", dlm.generate, name, [ids(3, 5), ids(4, 21), ids(5, 11)], **given)
            if name not in CAUSAL:
                given |= {"strategy": "multi_block", "max_active_blocks": 3, "block_add": 0.4}
                to.call(f"multi_block / {name} / {kind}", dlm.generate, name, [ids(6, 7), ids(7, 18)], **given)
    for rule in ("low_confidence", "entropy", "credit", "hierarchical"):
        given = ruled("llada", rule) | {"strategy": "multi_block", "max_active_blocks": 2, "block_add": 0.1}
        to.call(f"multi_block / llada / {rule}", dlm.generate, "llada", [ids(6, 7), ids(7, 18)], **given)
    yield "caches, multi_block"
    for name in MODELS:
        for draw, given in DRAWS.items():
            given = ruled(name, "random" if "k20" in draw else "threshold") | given | {"seed": 5}
            to.call(f"draws / {name} / {draw}", dlm.generate, name, [ids(8, 6)], **given)
        for kind, cached in caches(name).items():
            given = shape(name) | cached | {"cfg_scale": 0.7}
            to.call(f"guided / {name} / {kind}", dlm.generate, name, [ids(9, 8)], **given)
    to.call(
        "guided / llada / drawn", dlm.generate, "llada", [ids(9, 8)], **shape("llada"), cfg_scale=1.5, temperature=0.8
    )
    yield "draws, guided"
    for name in (*BIDIRECTIONAL, *BLOCKS):
        for kind, revised in REVISIONS.items():
            for cache_name in ("none", "dual refreshed" if name in BIDIRECTIONAL else "exact"):
                given = ruled(name, "threshold") | revised | caches(name)[cache_name]
                given |= {"strategy": "multi_block", "max_active_blocks": 2} if kind == "both" else {}
                to.call(f"revised / {name} / {kind}, {cache_name}", dlm.generate, name, [ids(10, 7)], **given)
    yield "revised"
    for name in MODELS:
        auto = {"gen_length": "auto", "max_gen_length": 24}
        auto |= {} if name in CAUSAL else {"steps": 2} | ({} if name in BLOCKS else {"block_length": 4})
        to.call(f"auto / {name}", dlm.generate, name, ["Once upon", "a time"], **auto)
        stop = {"stop": [*"acegikmo ", "No"]}
        to.call(f"stop / {name}", dlm.generate, name, ["One day", "The end"], **shape(name), **stop)
        talk = [
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": "Yes?"},
            {"role": "user", "content": "?"},
        ]
        to.call(
            f"chat / {name}", dlm.generate, name, talk, **shape(name), **({} if name in CAUSAL else {"rule": "margin"})
        )
    yield "auto, stop, chat"
    for name in MODELS:
        for kind, cached in caches(name).items():
            to.call(f"infill / {name} / {kind}", dlm.infill, name, [holes(1), holes(2)], steps=4, **cached)
        given = {"block_length": 3, "rule": "threshold", "threshold": 0.5}
        to.call(f"infill / {name} / blocks", dlm.infill, name, [holes(3)], **given)
        to.call(
            f"infill / {name} / text", dlm.infill, name, ["He said [MASK:4] and [MASK:2]."], temperature=0.5, steps=3
        )
    to.call("infill / llada / ranges", dlm.infill, "llada", ["It was [MASK:2-5] and [MASK:1-3]!"], steps=4)
    to.call("infill / sdar / ranges", dlm.infill, "sdar", ["It was [MASK:2-5]!"], steps=4)
    to.call("infill / Dream / revised", dlm.infill, "Dream", [holes(4)], steps=4, remask_threshold=0.5)
    to.call("infill / llada / guided", dlm.infill, "llada", [holes(5)], steps=4, cfg_scale=0.5)
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
            to.call(f"bf16 / {name} / {rule}", dlm.generate, name, [ids(11, 9), ids(12, 13)], **given)
        given = ruled(name, "threshold") | {"dtype": "bfloat16", "deterministic": True}
        to.call(f"bf16 / {name} / deterministic", dlm.generate, name, [ids(11, 9), ids(12, 13)], **given)
    yield "bf16"
    for rule in RULES:
        given = {"rule": rule, **RULES[rule], "gen_length": 32, "block_length": 16}
        to.call(f"bundled / pico / {rule}", dlm.generate, "pico", ["Once upon a time", "The"], **given)
    to.call("bundled / pico / dual", dlm.generate, "pico", ["Once upon a time"], gen_length=32, steps=8, cache="dual")
    to.call("bundled / pico / holes", dlm.infill, "pico", ["Once upon a [MASK:2], there was [MASK:3-5]."], steps=8)
    yield "bundled"


def record(output: Path) -> int:
    torch.set_num_threads(1)
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        to = Recorder(Path(folder))
        for group in everything(to):
            print(f"{time.perf_counter() - started:6.1f} s  {len(to.results):5} results  {group}", flush=True)
    machine = {"torch": torch.__version__, "cpu": torch.backends.cpu.get_cpu_capability(), "os": platform.platform()}
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps({"machine": machine, "results": to.results}, indent=0) + "\n", "utf-8")
    failed = [f"{name}: {result['error']}" for name, result in to.results.items() if "error" in result]
    print("\n".join([*failed, f"written: {output}: {len(to.results)} results, {len(failed)} errors"]))
    return 1 if failed else 0


def compare(old: Path, new: Path) -> int:
    before, after = (json.loads(path.read_text("utf-8")) for path in (old, new))
    for key in sorted(before["machine"].keys() | after["machine"].keys()):
        if (a := before["machine"].get(key)) != (b := after["machine"].get(key)):
            print(f"note: {key} was {a} and is {b}")
    counts: dict[str, list[int]] = {}
    for name in list(dict.fromkeys([*before["results"], *after["results"]])):
        a, b = before["results"].get(name), after["results"].get(name)
        count = counts.setdefault(name.split(" / ")[0], [0, 0])
        count[0] += 1
        if a == b:
            continue
        count[1] += 1
        if a is None or b is None:
            print(f"{name}: only in {new if a is None else old}")
            continue
        for field in sorted(a.keys() | b.keys()):
            if a.get(field) != b.get(field):
                print(f"{name}: {field}\n  {a.get(field)!r}\n  {b.get(field)!r}")
    for group, (total, differing) in counts.items():
        print(f"{group:12} {total:5} results, {differing} differ")
    differing = sum(count[1] for count in counts.values())
    print(f"{sum(count[0] for count in counts.values())} results, {differing} differ")
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
