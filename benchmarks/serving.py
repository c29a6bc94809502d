"""What HTTP costs: a server against the bare engine, both on the same requests, taking turns in one run.

python benchmarks/serving.py [--model pico] [--in-flight 8] [--requests 32] [--tokens 64] [--rounds 3]
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

from dlm.bench.config import ServeBenchSection
from dlm.bench.serve import _closed, _facts
from dlm.serving.client import Client

PROMPTS = ("import os\n", "def area(r):\n", "class File:\n", "Once upon a time")
BARE = """
import json, sys, time, dlm
from dlm.bench.load import InFlight, serve
options = json.loads(sys.argv[1])
lm = dlm.load(options["model"])
engine = dlm.Engine(lm)
prompts = [options["prompts"][i % len(options["prompts"])] for i in range(options["requests"])]
settings = [{"gen_length": options["tokens"], "seed": i} for i in range(len(prompts))]
print("ready", flush=True)
for line in sys.stdin:
    flight, count = map(int, line.split())
    service = serve(engine, prompts[:count], settings[:count], InFlight(flight))
    firsts = sorted(1000 * (one.first - one.arrived) for one in service.served)
    print(json.dumps({"throughput": service.tokens / service.seconds, "first_ms": firsts[len(firsts) // 2]}), flush=True)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="pico")
    for name, value in (("in-flight", 8), ("requests", 32), ("tokens", 64), ("rounds", 3)):
        parser.add_argument(f"--{name}", type=int, default=value)
    options = parser.parse_args()
    facts = {"model": options.model, "prompts": PROMPTS, "requests": options.requests, "tokens": options.tokens}
    bare = _started([sys.executable, "-c", BARE, json.dumps(facts)])
    command = ["-m", "dlm.cli.serve", "--model", options.model, "--serve.port", "0", "--serve.log", "false"]
    server = _started([sys.executable, *command])
    url = server.line.split()[-1]
    section = ServeBenchSection(url=url, requests=options.requests, max_tokens=options.tokens, prompts=PROMPTS)
    client = Client(url)
    body = {"max_tokens": options.tokens, "stream_options": {"include_usage": True}}
    ratios, overheads, firsts = [], [], []
    for number in range(options.rounds + 1):
        told = bare.ask(f"{options.in_flight} {options.requests}")
        asked, seconds = _closed(client, section, body, options.in_flight)
        served = _facts((asked, seconds), section)
        alone = bare.ask(f"1 {min(options.requests, 8)}")
        overhead, first = _first(client, body)
        if number == 0:
            continue  # warm-up
        ratios.append(served["throughput"] / told["throughput"])
        overheads.append(overhead)
        firsts.append(first - alone["first_ms"])
        print(
            f"round {number}: engine {told['throughput']:.1f}, server {served['throughput']:.1f} tokens/s, ratio {ratios[-1]:.3f}; "
            f"first byte {overhead:.2f} ms after the engine's first block; {first:.1f} ms against {alone['first_ms']:.1f} ms bare; "
            f"load {os.getloadavg()[0]:.1f}"
        )
    print(
        f"{options.model}, {options.in_flight} in flight: ratio {statistics.median(ratios):.3f} ({min(ratios):.3f}–{max(ratios):.3f}); "
        f"first byte {statistics.median(overheads):.2f} ms after the engine's own, {statistics.median(firsts):+.1f} ms against bare"
    )
    for process in (bare, server):
        process.end()


def _first(client: Client, body: dict, count: int = 8) -> tuple[float, float]:
    """Medians in ms, one request at a time: from the engine's first block, and from asking, to the first text here."""
    after, whole = [], []
    for number in range(count):
        sent = time.perf_counter()
        first = None
        for chunk in client.stream("/v1/completions", {**body, "prompt": PROMPTS[0], "seed": number}):
            if first is None and chunk["choices"] and chunk["choices"][0]["text"]:
                first = 1000 * (time.perf_counter() - sent)
            if "dlm" in chunk and "first_ms" in chunk["dlm"]:
                own = chunk["dlm"]["first_ms"]
        assert first is not None
        after.append(first - own)
        whole.append(first)
    return statistics.median(after), statistics.median(whole)


class _started:
    """A process that has said its first line."""

    def __init__(self, command: list[str]) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
            cwd=Path(__file__).parent.parent,
        )
        assert self.process.stdout is not None
        self.line = self.process.stdout.readline()

    def ask(self, line: str) -> dict:
        assert self.process.stdin is not None and self.process.stdout is not None
        print(line, file=self.process.stdin, flush=True)
        return json.loads(self.process.stdout.readline())

    def end(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.terminate()
        self.process.wait()


if __name__ == "__main__":
    main()
