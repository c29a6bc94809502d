"""`dlm-replay`: show a stored trace again, step by step; check or fork it with its model. Knows no algorithm."""

import argparse
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dlm.errors import UserError

from .streams import run, to_json
from .threads import settle_threads
from .trace import Parser, add_common

if TYPE_CHECKING:
    from dlm.trace.trace import Trace

MASK = "░"


def _parser() -> Parser:
    parser = Parser(
        prog="dlm-replay",
        description="Show a recorded request again: its text, every step of it, or a page. Needs no model, but for "
        "--verify and --fork-at.",
        epilog="--fork-at takes any setting of [sampler] as --sampler.temperature 0.7 and the like.",
        allow_abbrev=False,
    )
    parser.add_argument("id", nargs="?", metavar="REQUEST_ID", help="the trace to show; dlm-trace ls lists them")
    add_common(parser)
    add = parser.add_argument
    add(
        "--steps",
        nargs="?",
        const="all",
        metavar="A:B",
        help="print the canvas after every step, or after steps A to B",
    )
    add("--animate", action="store_true", help="show the steps live in the terminal")
    add("--delay", type=_delay, default=0.08, metavar="SECONDS", help="with --animate: time a step is shown (0.08)")
    add(
        "--html",
        metavar="FILE",
        help="write a page of it (with --fork-at: of the child): one file that needs nothing else",
    )
    add("--verify", action="store_true", help="run the model again, and compare every step")
    add("--fork-at", type=int, metavar="K", help="run on from step K with other settings; stores the child")
    add("--as", dest="name", metavar="ID", help="with --fork-at: the child's id")
    add("--overwrite", action="store_true", help="with --as: replace a trace of that id")
    add("--model", help="with --verify and --fork-at: the model, where it is not where it was")
    add("--device", default="auto", help="with --verify and --fork-at: where to run (auto)")
    add("--version", action="store_true", help="print the version, and stop")
    return parser


def _delay(text: str) -> float:
    """Seconds that a step is shown, for argparse."""
    try:
        delay = float(text)
    except ValueError:
        delay = -1.0
    if not 0 <= delay <= 60:
        raise argparse.ArgumentTypeError(f"{text[:60]!r}: give seconds from 0 to 60")
    return delay


def main(argv: Sequence[str] | None = None) -> int:
    return run("dlm-replay", lambda: _main(argv))


def _main(argv: Sequence[str] | None) -> int:
    parser = _parser()
    options, rest = parser.parse(argv, leave="--sampler.")
    if options.version:
        from dlm import __version__

        print(__version__)
        return 0
    if options.steps is not None and options.steps != "all" and not _is_range(options.steps):
        if options.id is not None:
            raise UserError(f"command line: --steps {options.steps}: expected steps such as 3:10, 3: or 7")
        options.id, options.steps = options.steps, "all"  # dlm-replay --steps ID
    if options.id is None:
        raise UserError("which one? give a request id (dlm-trace ls lists them)")
    if rest and options.fork_at is None:
        raise UserError(f"command line: {rest[0]} needs --fork-at K")
    from dlm.trace.reader import TraceReader, default_path

    path = Path(options.store) if options.store else default_path()
    with TraceReader(path) as store:
        trace = store[options.id]
        trace.check()
        if trace.pieces is None:
            trace.pieces = _pieces(trace)
    settle_threads()
    if options.verify:
        return _verify(path, trace, options)
    if options.fork_at is not None:
        return _fork(path, trace, options, rest)
    _show(trace, options)
    return 0


def _show(trace: "Trace", options: argparse.Namespace) -> None:
    if options.html is not None:
        _page(Path(options.html), trace)
        return
    if options.animate:
        _animate(trace, options.delay)
        return
    wanted = None if options.steps is None else _range(options.steps, trace.num_steps)
    if options.json:
        print(to_json(_told(trace, wanted)))
    elif wanted is None:
        print(trace.text())
    else:
        for k in wanted:
            _heading(trace, k)
            print(trace.text(k), end="\n\n")


def _page(path: Path, trace: "Trace") -> None:
    from dlm.trace.view import write

    write(path, trace)
    print(f"{path}: open it in a browser", file=sys.stderr)


def _heading(trace: "Trace", k: int) -> None:
    masks = int((trace.state(k)[: trace.length_at(k)] == trace.mask_id).sum())
    changed = "" if k == 0 else f" · {sum(event.step == k - 1 for event in trace.events())} changes"
    print(f"── step {k} of {trace.num_steps}{changed} · {masks} masks ──")


def _told(trace: "Trace", wanted: range | None) -> dict[str, Any]:
    """The trace as plain values; its states where they were asked for."""
    told: dict[str, Any] = {
        "request_id": trace.request_id,
        "text": trace.text() if trace.pieces is not None else None,
        "tokens": trace.tokens.tolist(),
        "steps": trace.steps.tolist(),
        "num_steps": trace.num_steps,
        "prompt_length": trace.prompt_length,
        "mask_id": trace.mask_id,
        "meta": trace.meta,
    }
    if wanted is not None:
        told["states"] = {k: trace.state(k)[: trace.length_at(k)].tolist() for k in wanted}
        told["events"] = [event._asdict() for event in trace.events() if event.step + 1 in wanted]
    return told


def _animate(trace: "Trace", delay: float) -> None:
    from rich.live import Live
    from rich.text import Text

    from .live import HEAT, console_for

    console = console_for(sys.stdout)
    given = (trace.first_step == -1).tolist()
    since = [-1] * trace.length  # the state in which each position became what it is

    def frame(k: int) -> Text:
        text = Text.assemble((f"{trace.request_id[:60]} ", "bold"), (f"step {k} of {trace.num_steps}\n\n", "dim"))
        for position, token in enumerate(trace.state(k)[: trace.length_at(k)].tolist()):
            if token == trace.mask_id:
                text.append(MASK, "dim")
            else:
                heat = HEAT[min(k - since[position], len(HEAT) - 1)]
                piece = f"{token} " if trace.pieces is None else trace.pieces.text([token])
                text.append(piece, "" if given[position] else heat)
        return Text("\n").join(text.split("\n", allow_blank=True)[-(console.height - 2) :])

    changes: dict[int, list[int]] = {}
    for event in trace.events():
        changes.setdefault(event.step + 1, []).append(event.position)
    with Live(frame(0), console=console, auto_refresh=False) as live:
        for k in range(1, trace.num_steps + 1):
            for position in changes.get(k, ()):
                since[position] = k
            if console.is_terminal:
                time.sleep(delay)
            live.update(frame(k), refresh=console.is_terminal or k == trace.num_steps)


def _verify(path: Path, trace: "Trace", options: argparse.Namespace) -> int:
    """Run the model again. Exit status 1 where it does something else."""
    lm = _model(trace, options)
    from dlm import replay  # type: ignore[attr-defined]
    from dlm.trace.reader import TraceReader

    if "parent" in trace.own:
        with TraceReader(path) as store:
            report = replay.verify(lm, trace, parents=store)
    else:
        report = replay.verify(lm, trace)
    print(to_json(report.to_dict()) if options.json else report)
    return 0 if report.identical else 1


def _fork(path: Path, trace: "Trace", options: argparse.Namespace, rest: list[str]) -> int:
    """Run on from a step with other settings, and store the child."""
    if not 0 <= options.fork_at <= trace.num_steps:
        raise UserError(f"--fork-at {options.fork_at}: the trace has steps 0 to {trace.num_steps}")
    settings = _settings(rest)
    from dlm.trace.store import TraceStore

    with TraceStore(path) as store:
        if options.name is not None and options.name in store and not options.overwrite:
            raise UserError(
                f"--as {options.name[:60]!r}: {path} has a trace of this id: give another id, or replace it with --overwrite"
            )
    lm = _model(trace, options)
    from dlm import replay  # type: ignore[attr-defined]

    child = replay.fork(lm, trace, step=options.fork_at, request_id=options.name, **settings)
    tokenizer = child.meta.get("tokenizer")
    with TraceStore(path) as store:
        if child.pieces is not None and isinstance(tokenizer, str):
            store.add_pieces(tokenizer, child.pieces)
        store.put(child, overwrite=options.overwrite)
    if child.pieces is None:
        child.pieces = trace.pieces
    if options.html is not None:
        _page(Path(options.html), child)
    print(to_json(_told(child, None)) if options.json else child.text())
    print(f"stored as {child.request_id}", file=sys.stderr)
    return 0


def _settings(rest: list[str]) -> dict[str, Any]:
    """What `--sampler.key value` pairs set, checked as in a config."""
    from dlm.config import load

    from .config import ForkConfig

    words, overrides = list(rest), {}
    while words:
        name, equals, value = words.pop(0).partition("=")
        if not name.startswith("--sampler."):
            raise UserError(f'unexpected word "{name}" (see dlm-replay --help)')
        if not equals:
            if not words:
                raise UserError(f"command line: {name} needs a value")
            value = words.pop(0)
        overrides[name.removeprefix("--")] = value
    sampler = load(ForkConfig, (), overrides).sampler
    return {key: getattr(sampler, key) for key in (name.removeprefix("sampler.") for name in overrides)}


def _model(trace: "Trace", options: argparse.Namespace) -> Any:
    name = options.model or trace.meta.get("model")
    if not isinstance(name, str):
        raise UserError(f"trace {trace.request_id[:60]!r} does not say which model wrote it: give --model")
    import dlm

    return dlm.load(name, device=options.device)


def _pieces(trace: "Trace") -> Any:
    """What tokens look like, from the model's own folder, where the store was not told."""
    from importlib.resources import files

    from dlm.trace.pieces import Pieces

    for key in ("tokenizer_path", "model"):
        name = trace.meta.get(key)
        if isinstance(name, str) and name:
            bundled = files("dlm") / "bundled" / name if re.fullmatch(r"[\w-]+", name) else None
            for folder in (Path(name), *([Path(str(bundled))] if bundled else [])):
                if (folder / "tokenizer.json").is_file():
                    return Pieces.of_tokenizer(folder)
    return None


def _is_range(text: str) -> bool:
    return re.fullmatch(r"-?\d{1,18}|(-?\d{1,18})?:(-?\d{1,18})?", text) is not None


def _range(text: str, last: int) -> range:
    """States 3 to 10 of "3:10", both shown; "3:" goes to the end, "7" is one."""
    if text == "all":
        return range(last + 1)
    first, colon, end = text.partition(":")
    low = int(first) if first else 0
    high = (int(end) if end else last) if colon else low
    low, high = (k + last + 1 if k < 0 else k for k in (low, high))
    if not 0 <= low <= high <= last:
        raise UserError(f"command line: --steps {text}: the trace has steps 0 to {last}")
    return range(low, high + 1)


if __name__ == "__main__":
    raise SystemExit(main())
