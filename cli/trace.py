"""`dlm-trace`: list, show, export and maintain the traces of a store."""

import json
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from dlm.errors import UserError

from .flags import STORE_FLAGS, Flag, Word, count
from .options import Command, Options, Subcommands, run_subcommand
from .streams import to_json

if TYPE_CHECKING:
    from dlm.trace.store import TraceStore

Work = Callable[["TraceStore", Options], int | None]


def main(argv: Sequence[str] | None = None) -> int:
    return run_subcommand("dlm-trace", "What is in a trace store, and keeping it in order.", SUBCOMMANDS, argv)


def _ls(store: "TraceStore", options: Options) -> None:
    from dlm.trace.times import iso, moment

    filters = {"model": options.value("--model"), "since": options.value("--since")}
    rows = store.find(**filters, newest=options.value("-n", 2**31))
    if "--json" in options.given:
        for row in rows:
            facts = {"request_id": row.request_id, "stored": iso(row.at), "context": row.context, "bytes": row.size}
            print(to_json(facts))
        return
    for row in rows:
        print(f"{moment(row.at)}  {row.size:>8,} B  {_line(row.request_id)}")


def _show(store: "TraceStore", options: Options) -> None:
    from dlm.trace.times import iso, moment

    trace = store[options.words[0]]
    trace.check()
    facts = {
        "request_id": trace.request_id,
        "stored": iso(trace.at) if "--json" in options.given else moment(trace.at),
        "tokens": trace.length,
        "prompt": trace.prompt_length,
        "steps": trace.num_steps,
        "later_events": len(trace.later),
        "mask_id": trace.mask_id,
        "has": [name for name in ("confidence", "topk_tokens", "accepted") if getattr(trace, name) is not None]
        + (["digests"] if trace.digests else []),
        **trace.meta,
    }
    if "--json" in options.given:
        print(to_json(facts))
        return
    for name, value in facts.items():
        shown = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        print(f"{name + ':':<16}{_line(shown)}")


def _diff(store: "TraceStore", options: Options) -> int:
    from dlm.trace.compare import diff

    a, b = (store[word] for word in options.words)
    found = diff(a, b)
    if (page := options.value("--html")) is not None:
        from pathlib import Path

        from dlm.trace.view import write

        write(Path(page), a, b)
    if "--json" in options.given:
        first = None if found.first is None else vars(found.first)
        print(to_json({"identical": found.identical, "first": first, "counts": found.counts, "facts": found.facts}))
    else:
        print(found)
    return 0 if found.identical else 1


def _export(store: "TraceStore", options: Options) -> None:
    url = options.words[0]
    written = store.export(url, **_given(rows=options.value("--rows")))
    _print(options, {"url": url, "written": written}, f"{url}: {written} more traces")


def _import(store: "TraceStore", options: Options) -> None:
    url = options.words[0]
    taken = store.import_(url, mask_id=options.value("--mask-id"), overwrite="--overwrite" in options.given)
    store.flush()
    _print(options, {"url": url, "taken": taken}, f"{url}: {taken} traces taken in")


def _fsck(store: "TraceStore", options: Options) -> int:
    report = store.fsck()
    lines = [*report.database, *(f"{_line(name)}: {what}" for name, what in report.damaged.items())]
    text = "\n".join([*lines, f"{report.traces} traces are whole, {len(report.damaged)} damaged"])
    _print(options, {"ok": report.ok, **vars(report)}, text)
    return 0 if report.ok else 1


def _gc(store: "TraceStore", options: Options) -> None:
    gone = store.gc(options.value("--keep"))
    _print(options, {"deleted": gone}, f"{gone} traces deleted, {len(store)} kept")


def _redact(store: "TraceStore", options: Options) -> None:
    names, everything = options.words, "--all" in options.given
    if bool(names) == everything:
        raise UserError("redact: give the ids of traces, or --all")
    count = store.redact(None if everything else names, "hash" if "--hash" in options.given else "omit")
    _print(options, {"redacted": count}, f"{count} traces have no prompt any more")


def _train_dict(store: "TraceStore", options: Options) -> None:
    number, recompress = store.train_dict(**_given(size=options.value("--size"))), "--recompress" in options.given
    saved = store.recompress() if recompress else 0
    text = f"dictionary {number} is used from now on" + (f"; {saved:,} bytes saved" if recompress else "")
    _print(options, {"dictionary": number, "saved": saved}, text)


def _stats(store: "TraceStore", options: Options) -> None:
    stats = store.stats()
    text = stats | {name: "none" if stats[name] is None else _local(stats[name]) for name in ("first", "last")}
    text["models"] = ", ".join(f"{_line(model)}: {count}" for model, count in stats["models"].items()) or "none"
    text["dictionaries"] = ", ".join(map(str, stats["dictionaries"])) or "none"
    _print(options, stats, "\n".join(f"{name + ':':<24}{value}" for name, value in text.items()))


def _given(**settings: Any) -> dict[str, Any]:
    """The settings that were given; the store has its own defaults for the others."""
    return {name: value for name, value in settings.items() if value is not None}


def _local(time: str) -> str:
    """A time in ISO 8601 as local time, as `ls` shows it."""
    from datetime import datetime

    return datetime.fromisoformat(time).astimezone().strftime("%Y-%m-%d %H:%M:%S")


def _print(options: Options, facts: dict[str, Any], text: str) -> None:
    print(to_json(facts) if "--json" in options.given else text)


def _line(text: str) -> str:
    """Text on one line, control characters replaced: an id may hold any character."""
    shown = "".join(character if character.isprintable() else "�" for character in text)
    return shown if len(shown) <= 120 else f"{shown[:119]}…"


def _kept(text: str) -> int | str:
    """The value of --keep: a number of traces as int, or an age as text."""
    return count(text) if text.isdecimal() else text


def _on_store(options: Options, work: Work, create: bool) -> int | None:
    from dlm.trace.store import TraceStore

    with TraceStore(options.value("--store"), create=create) as store:
        return work(store, options)


def _row(name: str, does: str, work: Work, *takes: Flag | Word, create: bool = False) -> Subcommands:
    """One row of the table: what a subcommand does, the function that does it, and what it takes."""
    command = Command(
        name=f"dlm-trace {name}",
        summary=does,
        words=tuple(one for one in takes if isinstance(one, Word)),
        flags=(*STORE_FLAGS, *(one for one in takes if isinstance(one, Flag))),
    )
    return {name: (command, partial(_on_store, work=work, create=create))}


ID, A, B = (Word(name, "Request id.") for name in ("ID", "A", "B"))
IDS = Word("ID", "Request ids.", required=False, repeatable=True)
TO = Word("URL", "Folder, or any fsspec URL: s3://bucket/traces.")
FROM = Word("URL", "File, folder, or any fsspec URL.")
MODEL = Flag("--model", "MODEL", "Only of this model.")
SINCE = Flag("--since", "TIME", "Only stored since: an ISO date, or an age such as 7d.")
NEWEST = Flag("-n", "N", "The newest N only.", kind=count)
HTML = Flag("--html", "FILE", "Write a page that shows both.")
ROWS = Flag("--rows", "N", "Traces a file holds at most.", kind=count)
MASK = Flag("--mask-id", "ID", "Id of the mask, for JSON lines that do not say.", kind=count)
OVERWRITE = Flag("--overwrite", help="Replace traces of the same id.")
KEEP = Flag("--keep", "N|AGE", "The newest N traces, or those younger than, say, 30d.", kind=_kept, required=True)
ALL = Flag("--all", help="Of every trace.")
HASH = Flag("--hash", help="Leave a hash, by which equal prompts are known.")
SIZE = Flag("--size", "BYTES", "Size of the dictionary.", kind=count)
RECOMPRESS = Flag("--recompress", help="Rewrite what is stored with it, too.")

SUBCOMMANDS: Subcommands = {
    **_row("ls", "List traces, newest first.", _ls, MODEL, SINCE, NEWEST),
    **_row("show", "Print what is known of one trace.", _show, ID),
    **_row("diff", "Compare two traces step by step; exit status 1 where they differ.", _diff, A, B, HTML),
    **_row("export", "Write traces as Parquet, going on where an earlier export stopped.", _export, TO, ROWS),
    **_row(
        "import", "Take in exported Parquet, or d3LLM-style JSON lines.", _import, FROM, MASK, OVERWRITE, create=True
    ),
    **_row("fsck", "Read everything and report what is damaged; exit status 1 if anything is.", _fsck),
    **_row("gc", "Delete old traces.", _gc, KEEP),
    **_row("redact", "Take prompts out of traces, for good.", _redact, IDS, ALL, HASH),
    **_row(
        "train-dict",
        "Learn a compression dictionary from the store's traces, and use it from now on.",
        _train_dict,
        SIZE,
        RECOMPRESS,
    ),
    **_row("stats", "Print counts and sizes.", _stats),
}


if __name__ == "__main__":
    raise SystemExit(main())
