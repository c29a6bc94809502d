"""`dlm-replay`: show a stored trace again, step by step; check or fork it with its model."""

import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dlm.errors import UserError

from .flags import STORE_FLAGS, Flag, Word
from .options import Command, Options
from .streams import to_json

if TYPE_CHECKING:
    from dlm.trace.trace import Trace


def _delay(text: str) -> float:
    try:
        delay = float(text)
    except ValueError:
        delay = -1.0
    if not 0 <= delay <= 60:
        raise ValueError(f"{text[:60]!r}: give seconds from 0 to 60")
    return delay


COMMAND = Command(
    name="dlm-replay",
    summary="Show a recorded request again: its text, every step of it, or a page. Needs no model, but for --verify and "
    "--fork-at. --fork-at takes any setting of [sampler] as --sampler.temperature 0.7 and the like.",
    unchecked="--sampler.",
    words=(Word("REQUEST_ID", "The trace to show; dlm-trace ls lists them.", required=False),),
    flags=(
        *STORE_FLAGS,
        Flag("--steps", "A:B", "Print the canvas after every step, or after steps A to B.", alone="all"),
        Flag("--animate", help="Show the steps live in the terminal."),
        Flag("--delay", "SECONDS", "With --animate: time a step is shown (0.08).", kind=_delay),
        Flag("--html", "FILE", "Write a page of it (with --fork-at: of the child): one file that needs nothing else."),
        Flag("--verify", help="Run the model again, and compare every step."),
        Flag("--fork-at", "K", "Run on from step K with other settings; stores the child.", kind=int),
        Flag("--as", "ID", "With --fork-at: the child's id."),
        Flag("--overwrite", help="With --as: replace a trace of that id."),
        Flag("--model", "MODEL", "With --verify and --fork-at: the model, where it is not where it was."),
        Flag(
            "--draft", "NAME", 'With --verify: the draft of a trace written with verify = "reject"; others need none.'
        ),
        Flag("--device", "DEVICE", "With --verify and --fork-at: where to run (auto)."),
    ),
)


def main(argv: Sequence[str] | None = None) -> int:
    return COMMAND.run(_work, argv)


def _work(options: Options) -> int | None:
    name, steps = next(iter(options.words), None), options.value("--steps")
    if steps is not None and steps != "all" and not _is_range(steps):
        if name is not None:
            raise UserError(f"command line: --steps {steps}: expected steps such as 3:10, 3: or 7")
        name, steps = steps, "all"  # dlm-replay --steps ID
    if name is None:
        raise UserError("which one? give a request id (dlm-trace ls lists them)")
    if options.overrides and "--fork-at" not in options.given:
        raise UserError(f"command line: --{next(iter(options.overrides))} needs --fork-at K")
    from dlm.trace.reader import TraceReader, default_path

    path = Path(given) if (given := options.value("--store")) else default_path()
    with TraceReader(path) as store:
        trace = store[name]
        trace.check()
        if trace.pieces is None:
            trace.pieces = _pieces(trace)
    if "--verify" in options.given:
        return _verify(path, trace, options)
    if "--fork-at" in options.given:
        return _fork(path, trace, options)
    return _show(trace, options, None if steps is None else _range(steps, trace.num_steps))


def _show(trace: "Trace", options: Options, states: range | None) -> None:
    if (page := options.value("--html")) is not None:
        _page(Path(page), trace)
    elif "--animate" in options.given:
        from .live import animate

        animate(trace, options.value("--delay", 0.08))
    elif "--json" in options.given:
        print(to_json(_facts(trace, states)))
    elif states is None:
        print(trace.text())
    else:
        for k in states:
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


def _facts(trace: "Trace", states: range | None) -> dict[str, Any]:
    """The trace as JSON values, with its states of the steps `states`."""
    facts: dict[str, Any] = {
        "request_id": trace.request_id,
        "text": trace.text() if trace.pieces is not None else None,
        "tokens": trace.tokens.tolist(),
        "steps": trace.steps.tolist(),
        "num_steps": trace.num_steps,
        "prompt_length": trace.prompt_length,
        "mask_id": trace.mask_id,
        "meta": trace.meta,
    }
    if states is not None:
        facts["states"] = {k: trace.state(k)[: trace.length_at(k)].tolist() for k in states}
        facts["events"] = [event._asdict() for event in trace.events() if event.step + 1 in states]
    return facts


def _verify(path: Path, trace: "Trace", options: Options) -> int:
    """Run the model again and compare; exit status 1 if anything differs."""
    lm = _model(trace, options)
    from dlm import replay  # type: ignore[attr-defined]
    from dlm.trace.reader import TraceReader

    draft = {"draft": options.value("--draft")} if "--draft" in options.given else {}
    if "parent" in trace.own:
        with TraceReader(path) as store:
            report = replay.verify(lm, trace, parents=store, **draft)
    else:
        report = replay.verify(lm, trace, **draft)
    print(to_json(report.to_dict()) if "--json" in options.given else report)
    return 0 if report.identical else 1


def _fork(path: Path, trace: "Trace", options: Options) -> int:
    step, name, overwrite = options.value("--fork-at"), options.value("--as"), "--overwrite" in options.given
    if not 0 <= step <= trace.num_steps:
        raise UserError(f"--fork-at {step}: the trace has steps 0 to {trace.num_steps}")
    settings = _settings(options.overrides)
    from dlm.trace.store import TraceStore

    with TraceStore(path) as store:
        if name is not None and name in store and not overwrite:
            raise UserError(
                f"--as {name[:60]!r}: {path} has a trace of this id: give another id, or replace it with --overwrite"
            )
    lm = _model(trace, options)
    from dlm import replay  # type: ignore[attr-defined]

    child = replay.fork(lm, trace, step=step, request_id=name, **settings)
    tokenizer = child.meta.get("tokenizer")
    with TraceStore(path) as store:
        if child.pieces is not None and isinstance(tokenizer, str):
            store.add_pieces(tokenizer, child.pieces)
        store.put(child, overwrite=overwrite)
    if child.pieces is None:
        child.pieces = trace.pieces
    if (page := options.value("--html")) is not None:
        _page(Path(page), child)
    print(to_json(_facts(child, None)) if "--json" in options.given else child.text())
    print(f"stored as {child.request_id}", file=sys.stderr)
    return 0


def _settings(overrides: dict[str, str]) -> dict[str, Any]:
    """What `--sampler.key value` pairs set, checked as in a config."""
    from dlm.config import load

    from .config import ForkConfig

    sampler = load(ForkConfig, (), overrides).sampler
    return {key: getattr(sampler, key) for key in (name.removeprefix("sampler.") for name in overrides)}


def _model(trace: "Trace", options: Options) -> Any:
    name = options.value("--model") or trace.meta.get("model")
    if not isinstance(name, str):
        raise UserError(f"trace {trace.request_id[:60]!r} does not say which model wrote it: give --model")
    import dlm

    return dlm.load(name, device=options.value("--device", "auto"))


def _pieces(trace: "Trace") -> Any:
    """The text of tokens, from the model's folder, for a trace whose store does not hold it."""
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
