"""What threads cost on a machine that is idle or busy: wall and CPU seconds of decoding, as ratios to one thread.

    python benchmarks/threads.py --rounds 5

Every figure is of a process of its own, since how threads wait is settled when torch starts. The variants take turns, and
each is set against the single thread of its own round: others' work then falls on all of them alike.
"""

import json
import os
import subprocess
import sys
from statistics import median

from measuring import parser, ratios, shown, spread

from dlm.cli.threads import BRIEFLY, NAMES

DECODE = """
import json, sys, time
import torch, dlm
lm = dlm.load("pico", device="cpu")
def decode(): return dlm.generate(lm, ["import os\\n"], gen_length=128, block_length=32, steps=128, cache="dual")
decode()
wall, cpu = time.perf_counter(), time.process_time()
decode()
print(json.dumps([time.perf_counter() - wall, time.process_time() - cpu]))
"""


def variants(cores: int) -> dict[str, dict[str, str]]:
    all_of_them = {"OMP_NUM_THREADS": str(cores)}
    return {
        "1 thread": {"OMP_NUM_THREADS": "1"},
        f"{cores} threads, OpenMP's own waiting": all_of_them,
        f"{cores} threads, brief waiting": all_of_them | BRIEFLY,
        "a command (nothing set)": BRIEFLY,
        "a program that imports dlm (nothing set)": {},
    }


def seconds(environment: dict[str, str], native: str) -> tuple[float, float]:
    """Wall and CPU seconds of one decode, in a new process."""
    clean = {name: value for name, value in os.environ.items() if name not in (*NAMES, "OMP_NUM_THREADS")}
    given = {**clean, **environment, "DLM_NATIVE": native}
    wall, cpu = json.loads(subprocess.check_output([sys.executable, "-c", DECODE], env=given))
    return wall, cpu


def main() -> None:
    words = parser(__doc__)
    words.add_argument("--rounds", type=int, default=5)
    words.add_argument("--native", choices=["0", "1"], default="1", help="0: torch's kernels instead of those in C")
    words.add_argument("--loads", nargs="*", choices=["as it is", "busy"], default=["as it is", "busy"])
    options = words.parse_args()
    cores = len(os.sched_getaffinity(0))
    for load in options.loads:
        count = cores if load == "busy" else 0
        busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
        try:
            kinds = variants(cores).items()
            rounds = [{name: seconds(given, options.native) for name, given in kinds} for _ in range(options.rounds)]
        finally:
            for process in busy:
                process.kill()
        print(f"\n{load}: {count} busy loops on {cores} cores; load average {os.getloadavg()[0]:.1f}")
        print(f"{'':42} wall s   CPU s   wall × (least–most)  CPU × (least–most)")
        for name in rounds[0]:
            print(f"{name:42} {_columns(name, rounds)}")


def _columns(name: str, rounds: list[dict[str, tuple[float, float]]]) -> str:
    medians = [median(each[name][k] for each in rounds) for k in (0, 1)]
    columns = [[[each[which][k] for each in rounds] for which in (name, "1 thread")] for k in (0, 1)]
    times = "".join(shown(spread(ratios(*column))).rjust(20) for column in columns)
    return f"{medians[0]:6.2f}  {medians[1]:6.2f} {times}"


if __name__ == "__main__":
    main()
