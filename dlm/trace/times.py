"""Points in time and ages as people write them. Knows nothing of what happened then."""

import re
import time
from datetime import datetime, timedelta
from typing import Any

from dlm.errors import UserError

TICKS = 10_000  # a second
UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


def ticks(moment: Any) -> int:
    """Ticks of 0.1 ms since 1970 of a datetime, of seconds since 1970, of an ISO date, or of an age such as "7d"."""
    if isinstance(moment, datetime):
        return int(moment.timestamp() * TICKS)
    if isinstance(moment, int | float):
        return int(moment * TICKS)
    age = seconds(moment)
    if age is not None:
        return int((time.time() - age) * TICKS)
    try:
        return int(datetime.fromisoformat(str(moment)).timestamp() * TICKS)
    except ValueError:
        raise UserError(f"{moment!r} is no time: write a date such as 2025-06-30, or an age such as 7d") from None


def seconds(age: Any) -> float | None:
    """Seconds of an age such as "12h"; None where it is none."""
    if isinstance(age, timedelta):
        return age.total_seconds()
    found = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)([smhdw])", str(age))
    return None if found is None else float(found[1]) * UNITS[found[2]]


def moment(at: int) -> str:
    """Ticks of 0.1 ms since 1970 as local time, to the second."""
    return datetime.fromtimestamp(at / TICKS).strftime("%Y-%m-%d %H:%M:%S")
