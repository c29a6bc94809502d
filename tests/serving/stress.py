"""Clients that leave, that read slowly, and ten times too many of them, against a real server process.

python -m tests.serving.stress [--cut 1000] [--slow 100] [--seconds 60] [--model pico]
"""

import argparse
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.request import urlopen


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, value in (("cut", 1000), ("slow", 100), ("seconds", 60), ("running", 8), ("waiting", 8)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--model", default="pico")
    options = parser.parse_args()
    command = [
        sys.executable,
        "-m",
        "dlm.cli.serve",
        "--model",
        options.model,
        "--serve.port",
        "0",
        "--serve.log",
        "false",
    ]
    command += ["--engine.max_num_requests", str(options.running), "--serve.max_waiting", str(options.waiting)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        port = int(process.stdout.readline().rsplit(":", 1)[1])
        for _ in range(3):  # what is kept from then on is there
            overload(port, 3, options)
        before = state(process.pid, port)
        print(f"before: {before}")
        cut(port, options.cut)
        print(f"{options.cut} cut: {settled(process.pid, port)}")
        slow(port, options.slow)
        print(f"{options.slow} slow readers: {settled(process.pid, port)}")
        codes = overload(port, options.seconds, options)
        after = settled(process.pid, port)
        print(f"overload, {options.seconds} s: {dict(codes)}; {after}")
        started = time.monotonic()
        process.send_signal(signal.SIGTERM)
        status = process.wait(60)
        print(f"SIGTERM: status {status} after {time.monotonic() - started:.1f} s; load {os.getloadavg()[0]:.1f}")
    grown = after["rss_mib"] / before["rss_mib"] - 1
    good = (
        set(codes) == {200, 429}
        and status == 0
        and after["running"] == after["waiting"] == after["pages"] == 0
        and after["files"] <= before["files"] + 2
        and after["threads"] <= before["threads"] + 1
        and grown < 0.05
    )
    print(f"memory {100 * grown:+.1f} %: {'nothing is left' if good else 'SOMETHING IS LEFT'}")
    return 0 if good else 1


def state(process: int, port: int) -> dict[str, float]:
    """What a server holds."""
    text, status = (
        urlopen(f"http://127.0.0.1:{port}/metrics").read().decode(),
        Path(f"/proc/{process}/status").read_text(),
    )

    def read(name: str) -> float:
        return float(re.search(rf"^{re.escape(name)} (.*)$", text, re.MULTILINE)[1])

    return {
        "running": read("dlm_running"),
        "waiting": read("dlm_waiting"),
        "pages": read('dlm_pages{state="used"}'),
        "files": len(os.listdir(f"/proc/{process}/fd")),
        "threads": int(re.search(r"Threads:\s*(\d+)", status)[1]),
        "rss_mib": int(re.search(r"VmRSS:\s*(\d+)", status)[1]) / 1024,
    }


def settled(process: int, port: int) -> dict[str, float]:
    """The state once nothing is under way."""
    for _ in range(300):
        found = state(process, port)
        if not found["running"] and not found["waiting"]:
            time.sleep(1.0)
            return state(process, port)
        time.sleep(0.2)
    return found


def connection(port: int, body: dict) -> socket.socket:
    found = socket.create_connection(("127.0.0.1", port), timeout=120)
    content = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {len(content)}\r\n"
    found.sendall(f"{head}content-type: application/json\r\n\r\n".encode() + content)
    return found


def body(number: int, **more: object) -> dict:
    return {
        "prompt": f"import {number}",
        "max_tokens": 32,
        "temperature": 1.0,
        "seed": number,
        "stream": number % 2 == 0,
        **more,
    }


def cut(port: int, count: int) -> None:
    """Connections that are closed at random moments."""
    draw = random.Random(0)

    def one(number: int) -> None:
        found = connection(port, body(number))
        time.sleep(draw.random() ** 2 * 1.5)
        if number % 7 == 0:
            found.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # a reset, no farewell
        found.close()

    with ThreadPoolExecutor(32) as pool:
        list(pool.map(one, range(count)))


def slow(port: int, count: int) -> None:
    """Readers that take a few bytes now and then, and leave after some seconds."""

    def one(number: int) -> None:
        found = connection(port, body(number, stream=True, stream_mode="denoise"))
        found.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        for _ in range(10):
            found.recv(16)
            time.sleep(0.5)
        found.close()

    threads = [threading.Thread(target=one, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def overload(port: int, seconds: float, options: argparse.Namespace) -> Counter[int]:
    """Ten times as many clients as may run and wait, again and again: the statuses they got."""
    codes: Counter[int] = Counter()
    end = time.monotonic() + seconds

    def one(number: int) -> None:
        draw = random.Random(number)
        while time.monotonic() < end:
            found = connection(port, body(number, max_tokens=8))
            answer = b""
            while part := found.recv(65536):
                answer += part
            found.close()
            code = int(answer.split(b" ", 2)[1])
            whole = code != 200 or answer.rstrip().endswith((b"[DONE]", b"0", b"}"))
            codes[code if (whole and b'"error"' not in answer) or code != 200 else 0] += 1
            if code == 429:
                time.sleep(draw.random())

    threads = [threading.Thread(target=one, args=(n,)) for n in range(10 * (options.running + options.waiting))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return codes


if __name__ == "__main__":
    sys.exit(main())
