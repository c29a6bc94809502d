"""What HTTP costs: a server against the bare engine, both on the same requests, taking turns in one run.

python benchmarks/serving.py [--model pico] [--in-flight 8] [--requests 32] [--tokens 64] [--rounds 3]

Bare is an engine that has the next request as soon as one ends. The server is `dlm-serve` as it comes, over a socket of its own
for each request. Its client runs on the same cores, so it does the least a client can: it notes when bytes came, and reads them
when the run is over.
"""

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PROMPTS = ("import os\n", "def area(r):\n", "class File:\n", "Once upon a time")
BARE = """
import json, sys, dlm
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
    found = {"throughput": service.tokens / service.seconds, "first_ms": firsts[len(firsts) // 2], "forwards": service.forwards}
    print(json.dumps(found), flush=True)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="pico")
    for name, value in (("in-flight", 8), ("requests", 32), ("tokens", 64), ("rounds", 3)):
        parser.add_argument(f"--{name}", type=int, default=value)
    options = parser.parse_args()
    facts = {"model": options.model, "prompts": PROMPTS, "requests": options.requests, "tokens": options.tokens}
    bare = Process([sys.executable, "-c", BARE, json.dumps(facts)])
    command = ["-m", "dlm.cli.serve", "--model", options.model, "--serve.port", "0", "--serve.log", "false"]
    server = Process([sys.executable, *command])
    caller = Caller(server.line.split()[-1], options.tokens)
    ratios, overheads, firsts = [], [], []
    for number in range(options.rounds + 1):
        engine = bare.ask(f"{options.in_flight} {options.requests}")
        throughput, forwards = caller.several(options.requests, options.in_flight)
        alone = bare.ask(f"1 {min(options.requests, 2)}")
        overhead, first = caller.one_by_one(min(options.requests, 2))
        if number == 0:
            continue  # warm-up
        ratios.append(throughput / engine["throughput"])
        overheads.append(overhead)
        firsts.append(first - alone["first_ms"])
        print(
            f"round {number}: engine {engine['throughput']:.1f}, server {throughput:.1f} tokens/s, ratio {ratios[-1]:.3f} "
            f"({engine['forwards']} and {forwards} forwards); first text {overhead:.2f} ms beside the engine's first block; "
            f"{first:.1f} ms against {alone['first_ms']:.1f} ms bare; load {os.getloadavg()[0]:.1f}",
            flush=True,
        )
    print(
        f"{options.model}, {options.in_flight} in flight: ratio {statistics.median(ratios):.3f} ({min(ratios):.3f}–{max(ratios):.3f}); "
        f"first text {statistics.median(overheads):.2f} ms beside the engine's first block, {statistics.median(firsts):+.1f} ms against bare"
    )
    for process in (bare, server):
        process.end()


@dataclass
class Answer:
    """A stream as it came: when, and which bytes."""

    sent: float
    parts: list[tuple[float, bytes]] = field(default_factory=list)

    def chunks(self) -> list[tuple[float, dict[str, Any]]]:
        """Its chunks, each with the time at which it was whole."""
        found, rest = [], b""
        for at, part in self.parts:
            *lines, rest = (rest + part).split(b"\n\n")
            for line in lines:
                data = line.partition(b"data: ")[2]
                if data and data != b"[DONE]":
                    found.append((at, json.loads(data)))
        return found


class Caller:
    """Asks a server for streams."""

    def __init__(self, url: str, tokens: int) -> None:
        self.tokens = tokens
        self.address = ("127.0.0.1", int(url.rsplit(":", 1)[1]))

    def ask(self, number: int) -> Answer:
        """One request, to its end."""
        settings = {
            "max_tokens": self.tokens,
            "seed": number,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        body = json.dumps({"prompt": PROMPTS[number % len(PROMPTS)], **settings}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nhost: here\r\nconnection: close\r\ncontent-length: {len(body)}\r\n"
        answer = Answer(time.perf_counter())
        with socket.create_connection(self.address) as connection:
            connection.sendall(head.encode() + b"content-type: application/json\r\n\r\n" + body)
            while part := connection.recv(65536):
                answer.parts.append((time.perf_counter(), part))
        return answer

    def several(self, count: int, flight: int) -> tuple[float, int]:
        """Tokens a second with so many requests in flight, and the forwards that took."""
        before = self._forwards()
        with ThreadPoolExecutor(flight) as pool:
            answers = list(pool.map(self.ask, range(count)))
        seconds = max(at for answer in answers for at, _ in answer.parts) - min(answer.sent for answer in answers)
        used = [chunk["usage"]["completion_tokens"] for a in answers for _, chunk in a.chunks() if not chunk["choices"]]
        assert len(used) == count
        return sum(used) / seconds, self._forwards() - before

    def one_by_one(self, count: int) -> tuple[float, float]:
        """Medians in ms from asking to the first text: without the engine's own share of it, and all of it."""
        beside, whole = [], []
        for number in range(count):
            answer = self.ask(number)
            chunks = answer.chunks()
            texts = [at for at, chunk in chunks if chunk["choices"] and chunk["choices"][0]["text"]]
            own = next(chunk["dlm"]["first_ms"] for _, chunk in chunks if "dlm" in chunk)
            whole.append(1000 * (texts[0] - answer.sent))
            beside.append(whole[-1] - own)
        return statistics.median(beside), statistics.median(whole)

    def _forwards(self) -> int:
        with socket.create_connection(self.address) as connection:
            connection.sendall(b"GET /metrics HTTP/1.1\r\nhost: here\r\nconnection: close\r\n\r\n")
            text = b"".join(iter(lambda: connection.recv(65536), b"")).decode()
        return int(float(text.partition("\ndlm_forwards_total ")[2].split()[0]))


class Process:
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
