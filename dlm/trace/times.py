"""Reads and writes times and ages such as "2025-06-30" and "7d"."""

import re
import time
from datetime import UTC, datetime, timedelta
from typing import Any

from dlm.errors import UserError

TICKS = 10_000  # a second
FAR = 2**62  # ticks: times beyond are cut to it
UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


def ticks(moment: Any) -> int:
    """Ticks of 0.1 ms since 1970 of a datetime, of seconds since 1970, of an ISO date, or of an age such as "7d"."""
    try:
        if isinstance(moment, datetime):
            since = moment.timestamp()
        elif isinstance(moment, int | float):
            since = moment
        elif (age := seconds(moment)) is not None:
            since = time.time() - age
        else:
            since = datetime.fromisoformat(str(moment)).timestamp()
        return round(min(max(since * TICKS, -FAR), FAR))
    except (ValueError, OverflowError):
        raise UserError(f"{moment!r} is no time: write a date such as 2025-06-30, or an age such as 7d") from None


def seconds(age: Any) -> float | None:
    """Seconds of an age such as "12h"; None where it is none."""
    if isinstance(age, timedelta):
        return age.total_seconds()
    found = re.fullmatch(r"([0-9]{1,18}(?:\.[0-9]{1,9})?)([smhdw])", str(age))
    return None if found is None else float(found[1]) * UNITS[found[2]]


def when(at: int) -> datetime:
    """Ticks of 0.1 ms since 1970 as a time in UTC. Raises UserError for what no clock ever showed."""
    try:
        return datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=at * (1_000_000 // TICKS))
    except OverflowError:
        raise UserError(f"{at} ticks since 1970 are no time: the store is damaged; dlm-trace fsck says where") from None


def iso(at: int) -> str:
    """Ticks of 0.1 ms since 1970 as ISO 8601, in UTC and to the tick."""
    return when(at).isoformat()


def moment(at: int) -> str:
    """Ticks of 0.1 ms since 1970 as local time, to the second."""
    return when(at).astimezone().strftime("%Y-%m-%d %H:%M:%S")
