"""One line of JSON an item, written as soon as it is judged: what lets a killed evaluation go on where it was."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dlm.errors import UserError
from dlm.evaluation.suite.trial import Record


class Records:
    """A file of records; each names its run, by a digest of everything that decides it."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.found: dict[tuple[str, str], Record] = {}
        try:
            self._read()
            self.handle = file.open("ab")
        except OSError as error:
            raise UserError(f"output.file: {file} cannot be written: {error.strerror}") from None

    def _read(self) -> None:
        """What an earlier run left. A last line that was cut off goes."""
        if not self.file.exists():
            return
        whole = 0
        with self.file.open("rb") as file:
            for line in file:
                try:
                    row = json.loads(line) if line.endswith(b"\n") else None
                except ValueError:
                    row = None
                if not isinstance(row, dict) or "run" not in row:
                    break
                self.found[row["run"], row["record"]["item"]] = row["record"]
                whole += len(line)
        if whole < self.file.stat().st_size:
            os.truncate(self.file, whole)

    def of(self, run: str, item: str) -> Record | None:
        """The record of an item, if it is done."""
        return self.found.get((run, item))

    def add(self, run: str, records: Sequence[Record]) -> None:
        """Write some, all or none of their bytes lost by a crash."""
        lines = ""
        for record in records:
            record = plain(record)
            self.found[run, record["item"]] = record
            lines += json.dumps({"run": run, "record": record}, ensure_ascii=False) + "\n"
        self.handle.write(lines.encode("utf-8", "backslashreplace"))
        self.handle.flush()
        os.fsync(self.handle.fileno())

    def close(self) -> None:
        self.handle.close()


def plain(value: Any) -> Any:
    """The value as JSON gives it back, so that what is computed and what is read again are the same."""
    return json.loads(json.dumps(value, ensure_ascii=True, default=_as_plain))


def _as_plain(value: Any) -> Any:
    return value.item() if hasattr(value, "item") else str(value)
