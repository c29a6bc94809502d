"""`dlm-trace`: what is in a trace store, and keeping it in order. Knows no model."""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from dlm.errors import UserError

from .streams import run, to_json

if TYPE_CHECKING:
    from dlm.trace.store import TraceStore


class Parser(argparse.ArgumentParser):
    """argparse with this house's errors: one message that names the nearest known word, and exit status 2."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"command line: {message} (see {self.prog} --help)")

    def parse(self, argv: Sequence[str] | None, leave: str | None = None) -> tuple[argparse.Namespace, list[str]]:
        """The options, and the words of unknown ones that start with `leave`."""
        options, rest = self.parse_known_args(sys.argv[1:] if argv is None else list(argv))
        strange = next(
            (word for word in rest if word.startswith("--") and not (leave and word.startswith(leave))), None
        )
        if strange is not None:
            import difflib

            near = difflib.get_close_matches(strange, self.known(), n=1, cutoff=0.6)
            hint = f'; did you mean "{near[0]}"?' if near else ""
            raise UserError(f"command line: unknown option {strange}{hint} (see {self.prog} --help)")
        if rest and leave is None:
            raise UserError(f'unexpected word "{rest[0]}" (see {self.prog} --help)')
        return options, rest

    def known(self) -> list[str]:
        """Every option there is, those of the commands below too."""
        found: list[str] = []
        for action in self._actions:
            found += action.option_strings
            if isinstance(action, argparse._SubParsersAction):
                found += [name for parser in action.choices.values() for name in parser.known()]
        return found


def add_common(parser: argparse.ArgumentParser) -> None:
    """What both commands that read a store take."""
    parser.add_argument("--store", metavar="FILE", help="the trace store (default: DLM_TRACES, else runs/traces.db)")
    parser.add_argument("--json", action="store_true", help="print JSON")


def count(text: str) -> int:
    """A number of things, for argparse: 0 to 2**53."""
    number = int(text) if text.isascii() and text.isdecimal() and len(text) < 17 else -1
    if not 0 <= number <= 2**53:
        raise argparse.ArgumentTypeError(f"{text[:60]!r} is no number from 0 to {2**53}")
    return number


def _kept(text: str) -> int | str:
    """What `gc` keeps: a number of traces, or an age as it is."""
    return count(text) if text.isdecimal() else text


def open_store(path: str | None, **options: Any) -> "TraceStore":
    from dlm.trace.store import TraceStore

    return TraceStore(path, create=False, **options)


def _parser() -> Parser:
    parser = Parser(
        prog="dlm-trace", description="What is in a trace store, and keeping it in order.", allow_abbrev=False
    )
    parser.add_argument("--version", action="store_true", help="print the version, and stop")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=Parser)

    def command(name: str, does: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=does, description=f"{does[0].upper()}{does[1:]}.", allow_abbrev=False)
        add_common(sub)
        return sub

    ls = command("ls", "list traces, newest first")
    ls.add_argument("--model", help="only of this model")
    ls.add_argument("--since", metavar="TIME", help="only stored since: an ISO date, or an age such as 7d")
    ls.add_argument("-n", type=count, default=None, metavar="N", help="the newest N only")
    show = command("show", "print what is known of one trace")
    show.add_argument("id", help="request id")
    diff = command("diff", "compare two traces step by step; exit status 1 where they differ")
    diff.add_argument("a", help="request id")
    diff.add_argument("b", help="request id")
    diff.add_argument("--html", metavar="FILE", help="write a page that shows both")
    export = command("export", "write traces as Parquet, going on where an earlier export stopped")
    export.add_argument("url", help="folder, or any fsspec URL: s3://bucket/traces")
    export.add_argument("--rows", type=count, default=None, metavar="N", help="traces a file holds at most")
    take = command("import", "take in exported Parquet, or d3LLM-style JSON lines")
    take.add_argument("url", help="file, folder, or any fsspec URL")
    take.add_argument("--mask-id", type=count, help="id of the mask, for JSON lines that do not say")
    take.add_argument("--overwrite", action="store_true", help="replace traces of the same id")
    command("fsck", "read everything and report what is damaged; exit status 1 if anything is")
    gc = command("gc", "delete old traces")
    gc.add_argument(
        "--keep",
        type=_kept,
        required=True,
        metavar="N|AGE",
        help="the newest N traces, or those younger than, say, 30d",
    )
    redact = command("redact", "take prompts out of traces, for good")
    redact.add_argument("id", nargs="*", help="request ids")
    redact.add_argument("--all", action="store_true", help="of every trace")
    redact.add_argument("--hash", action="store_true", help="leave a hash, by which equal prompts are known")
    train = command("train-dict", "learn a compression dictionary from the store's traces, and use it from now on")
    train.add_argument("--size", type=count, default=None, metavar="BYTES", help="size of the dictionary")
    train.add_argument("--recompress", action="store_true", help="rewrite what is stored with it, too")
    command("stats", "print counts and sizes")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    return run("dlm-trace", lambda: _main(argv))


def _main(argv: Sequence[str] | None) -> int:
    parser = _parser()
    options, _ = parser.parse(argv)
    if options.version:
        from dlm import __version__

        print(__version__)
        return 0
    if options.command is None:
        parser.print_help()
        return 0
    create = options.command == "import"
    if create:
        from dlm.trace.store import TraceStore

        store = TraceStore(options.store)
    else:
        store = open_store(options.store)
    with store:
        return COMMANDS[options.command](store, options) or 0


def _ls(store: "TraceStore", options: argparse.Namespace) -> None:
    from dlm.trace.times import iso, moment

    wanted = {"model": options.model, "since": options.since}
    rows = store.find(**wanted, newest=options.n if options.n is not None else 2**31)
    if options.json:
        for row in rows:
            facts = {"request_id": row.request_id, "stored": iso(row.at), "context": row.context, "bytes": row.size}
            print(to_json(facts))
        return
    for row in rows:
        print(f"{moment(row.at)}  {row.size:>8,} B  {_line(row.request_id)}")


def _show(store: "TraceStore", options: argparse.Namespace) -> None:
    from dlm.trace.times import iso, moment

    trace = store[options.id]
    trace.check()
    facts = {
        "request_id": trace.request_id,
        "stored": iso(trace.at) if options.json else moment(trace.at),
        "tokens": trace.length,
        "prompt": trace.prompt_length,
        "steps": trace.num_steps,
        "later_events": len(trace.later),
        "mask_id": trace.mask_id,
        "has": [name for name in ("confidence", "topk_tokens", "accepted") if getattr(trace, name) is not None]
        + (["digests"] if trace.digests else []),
        **trace.meta,
    }
    if options.json:
        print(to_json(facts))
        return
    for name, value in facts.items():
        shown = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        print(f"{name + ':':<16}{_line(shown)}")


def _diff(store: "TraceStore", options: argparse.Namespace) -> int:
    from dlm.trace.compare import diff

    a, b = store[options.a], store[options.b]
    found = diff(a, b)
    if options.html:
        from pathlib import Path

        from dlm.trace.view import write

        write(Path(options.html), a, b)
    if options.json:
        first = None if found.first is None else vars(found.first)
        print(to_json({"identical": found.identical, "first": first, "counts": found.counts, "facts": found.facts}))
    else:
        print(found)
    return 0 if found.identical else 1


def _export(store: "TraceStore", options: argparse.Namespace) -> None:
    written = store.export(options.url, **({} if options.rows is None else {"rows": options.rows}))
    _tell(options, {"url": options.url, "written": written}, f"{options.url}: {written} more traces")


def _import(store: "TraceStore", options: argparse.Namespace) -> None:
    taken = store.import_(options.url, mask_id=options.mask_id, overwrite=options.overwrite)
    store.flush()
    _tell(options, {"url": options.url, "taken": taken}, f"{options.url}: {taken} traces taken in")


def _fsck(store: "TraceStore", options: argparse.Namespace) -> int:
    report = store.fsck()
    lines = [*report.database, *(f"{_line(name)}: {what}" for name, what in report.damaged.items())]
    text = "\n".join([*lines, f"{report.traces} traces are whole, {len(report.damaged)} damaged"])
    _tell(options, {"ok": report.ok, **vars(report)}, text)
    return 0 if report.ok else 1


def _gc(store: "TraceStore", options: argparse.Namespace) -> None:
    gone = store.gc(options.keep)
    _tell(options, {"deleted": gone}, f"{gone} traces deleted, {len(store)} kept")


def _redact(store: "TraceStore", options: argparse.Namespace) -> None:
    if bool(options.id) == options.all:
        raise UserError("redact: give the ids of traces, or --all")
    count = store.redact(None if options.all else options.id, "hash" if options.hash else "omit")
    _tell(options, {"redacted": count}, f"{count} traces have no prompt any more")


def _train_dict(store: "TraceStore", options: argparse.Namespace) -> None:
    number = store.train_dict(**({} if options.size is None else {"size": options.size}))
    saved = store.recompress() if options.recompress else 0
    text = f"dictionary {number} is used from now on" + (f"; {saved:,} bytes saved" if options.recompress else "")
    _tell(options, {"dictionary": number, "saved": saved}, text)


def _stats(store: "TraceStore", options: argparse.Namespace) -> None:
    stats = store.stats()
    text = stats | {name: "none" if stats[name] is None else _local(stats[name]) for name in ("first", "last")}
    text["models"] = ", ".join(f"{_line(model)}: {count}" for model, count in stats["models"].items()) or "none"
    text["dictionaries"] = ", ".join(map(str, stats["dictionaries"])) or "none"
    _tell(options, stats, "\n".join(f"{name + ':':<24}{value}" for name, value in text.items()))


def _local(time: str) -> str:
    """A time in ISO 8601 as local time, as `ls` shows it."""
    from datetime import datetime

    return datetime.fromisoformat(time).astimezone().strftime("%Y-%m-%d %H:%M:%S")


def _tell(options: argparse.Namespace, facts: dict[str, Any], text: str) -> None:
    print(to_json(facts) if options.json else text)


def _line(text: str) -> str:
    """Foreign text on one line, without what would steer a terminal; an id may hold anything."""
    shown = "".join(character if character.isprintable() else "�" for character in text)
    return shown if len(shown) <= 120 else f"{shown[:119]}…"


COMMANDS: dict[str, Callable[["TraceStore", argparse.Namespace], int | None]] = {
    "ls": _ls,
    "show": _show,
    "diff": _diff,
    "export": _export,
    "import": _import,
    "fsck": _fsck,
    "gc": _gc,
    "redact": _redact,
    "train-dict": _train_dict,
    "stats": _stats,
}


if __name__ == "__main__":
    raise SystemExit(main())
