"""What the scripts here share: jobs that take turns, ratios within rounds, tables, JSON files, facts of the machine."""

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

# Nothing of dlm is imported here: train.py also runs in an interpreter that has a peer's packages instead.

RESULTS = Path(__file__).parent / "results"
CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.process_time}
Job = Callable[[], Any]


def parser(description: str | None) -> argparse.ArgumentParser:
    """A parser whose help is a script's docstring."""
    return argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)


def now(device: str = "cpu") -> dict[str, float]:
    """The time by each clock, after the device has finished its work."""
    if device != "cpu":
        import torch

        torch.cuda.synchronize()
    return {name: clock() for name, clock in CLOCKS.items()}


def timed(job: Job, device: str = "cpu") -> tuple[dict[str, float], Any]:
    """The seconds a call takes by each clock, and what it returns."""
    before = now(device)
    result = job()
    return {name: end - before[name] for name, end in now(device).items()}, result


def in_turns(
    jobs: Mapping[str, Job], rounds: int, device: str = "cpu"
) -> tuple[dict[str, dict[str, list[float]]], dict[str, Any]]:
    """By each clock the seconds of every job in every round; and what each job returned last.

    The order is reversed from round to round, so that drift favours no job. One more round before fills caches.
    """
    seconds: dict[str, dict[str, list[float]]] = {clock: {name: [] for name in jobs} for clock in CLOCKS}
    results: dict[str, Any] = {}
    for number in range(rounds + 1):
        for name, job in list(jobs.items())[:: -1 if number % 2 else 1]:
            taken, results[name] = timed(job, device)
            for clock, value in taken.items():
                seconds[clock][name] += [value] if number else []
        print(f"round {number} of {rounds}", file=sys.stderr, flush=True)
    return seconds, results


def spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "low": min(values), "high": max(values)}


def quartiles(values: Sequence[float]) -> dict[str, float]:
    """Median, and the quartiles around it."""
    low, median, high = statistics.quantiles(values, n=4) if len(values) > 1 else list(values) * 3
    return {"median": median, "low": low, "high": high}


def ratios(over: Sequence[float], under: Sequence[float]) -> list[float]:
    """The ratio of two jobs' times in each round: both then had the same load."""
    return [a / b for a, b in zip(over, under, strict=True)]


def shown(found: Mapping[str, float], digits: int = 2) -> str:
    """`1.05 (0.98–1.10)`"""
    return "{median:.{n}f} ({low:.{n}f}–{high:.{n}f})".format(**found, n=digits)


def machine(device: str = "cpu") -> dict[str, Any]:
    """The machine and the versions that figures were measured with, as plain values."""
    import torch

    git = ["git", "describe", "--always", "--dirty", "--abbrev=40"]
    commit = subprocess.run(git, cwd=Path(__file__).parent, capture_output=True, text=True, check=False).stdout.strip()
    facts = {"device": platform.processor() or platform.machine(), "cores": os.cpu_count(), "commit": commit or None}
    facts |= {"load_before": os.getloadavg()[0], "python": platform.python_version(), "torch": torch.__version__}
    try:
        facts["triton"] = version("triton")
    except PackageNotFoundError:
        facts["triton"] = None
    if torch.device(device).type == "cuda":
        gpu = torch.cuda.get_device_properties(device)
        facts |= {"device": gpu.name, "memory": gpu.total_memory, "multiprocessors": gpu.multi_processor_count}
        facts |= {"cuda": torch.version.cuda, "hip": torch.version.hip}
    return facts


def peak_rss() -> int:
    """Bytes. The kernel's own figure where there is one: getrusage's also remembers the parent before exec."""
    status = Path("/proc/self/status")
    if status.exists():
        return next(int(line.split()[1]) for line in status.read_text().splitlines() if line.startswith("VmHWM")) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def write(file: Path, report: Any) -> None:
    """Write a report as JSON, and print its path."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(report, indent=1, default=str, ensure_ascii=False) + "\n", "utf-8")
    print(f"written: {file}")
