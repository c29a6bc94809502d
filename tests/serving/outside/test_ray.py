"""On Ray, on this machine: two replicas say what one says, a killed one cuts its stream alone, a killed job goes on."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from pathlib import Path

import httpx
import pytest

import dlm

pytestmark = [pytest.mark.outside, pytest.mark.filterwarnings("default")]
pytest.importorskip("ray", reason="bash scripts/test --outside brings it")

MARK, RUN = "DLM_TESTS_OF_RAY", uuid.uuid4().hex
BODY = {"prompt": "import ", "max_tokens": 16, "temperature": 1.0}


@pytest.fixture(scope="module")
def url():
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    options = [
        "--model",
        "pico",
        "--serve.port",
        str(port),
        "--replicas.least",
        "2",
        "--ray.num_cpus",
        "0.5",
        "--serve.log",
        "false",
    ]
    command = [sys.executable, "-m", "dlm.cli.serve", *options]
    with subprocess.Popen(command, env={**os.environ, MARK: RUN}, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("dlm-serve: pico at http://127.0.0.1:"), line
        yield line.split()[3]
        process.send_signal(signal.SIGTERM)
        assert process.wait(120) == 0


def replicas() -> list[int]:
    """The processes of this test's replicas, and of no other server's: children inherit the mark."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                ours = f"{MARK}={RUN}".encode() in (entry / "environ").read_bytes()
                if ours and b"ServeReplica:dlm" in (entry / "cmdline").read_bytes():
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


def test_replicas_say_what_one_says(url):
    lm = dlm.load("pico")
    with httpx.Client(base_url=url, timeout=300) as client:
        for seed in range(6):
            expected = dlm.generate(lm, ["import "], gen_length=16, temperature=1.0, seed=seed)[0].text
            assert client.post("/v1/completions", json={**BODY, "seed": seed}).json()["choices"][0]["text"] == expected
            with client.stream("POST", "/v1/completions", json={**BODY, "seed": seed, "stream": True}) as response:
                lines = [line[6:] for line in response.iter_lines() if line.startswith("data: ")]
            assert lines.pop() == "[DONE]"
            assert "".join(json.loads(line)["choices"][0]["text"] for line in lines) == expected
        assert client.post("/v1/completions", json={**BODY, "max_tokens": 0}).status_code == 400
        assert client.get("/ready").status_code == 200


def test_a_killed_replica_cuts_its_stream_alone(url):
    with httpx.Client(base_url=url, timeout=300) as client:
        cut = False
        try:
            long = {**BODY, "max_tokens": 512, "steps": 512, "stream": True, "stream_mode": "denoise"}
            with client.stream("POST", "/v1/completions", json=long) as response:
                for number, line in enumerate(response.iter_lines()):
                    if number == 4:
                        for process in replicas():
                            os.kill(process, signal.SIGKILL)
                    cut = cut or '"error"' in line
                    assert line != "data: [DONE]"
        except httpx.HTTPError:
            cut = True  # Ray's proxy ends the connection: no client takes this for a whole answer
        assert cut
        end = time.monotonic() + 600
        while time.monotonic() < end:
            answer = client.post("/v1/completions", json={**BODY, "seed": 1})
            if answer.status_code == 200:
                break
            time.sleep(1)
        assert answer.status_code == 200 and len(answer.json()["choices"][0]["text"])


def test_a_killed_job_goes_on(tmp_path):
    """Two actors, killed with everything on the way; then two again, and once more by one process without Ray."""
    rows = [{"id": f"row {n}", "prompt": f"import {n}"} for n in range(40)]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    common = [
        sys.executable,
        "-m",
        "dlm.cli.batch",
        "--model",
        "pico",
        "--input",
        str(tmp_path / "in.jsonl"),
        "--batch.rows_per_part",
        "4",
    ]
    common += ["--sampler.gen_length", "16", "--sampler.temperature", "1.0"]
    fanned = [*common, "--output", str(tmp_path / "out"), "--actors", "2", "--ray.num_cpus", "0.5"]
    with subprocess.Popen(fanned, stderr=subprocess.DEVNULL) as first:
        end = time.monotonic() + 600
        while time.monotonic() < end and len(list((tmp_path / "out").glob("part-*.jsonl"))) < 2:
            time.sleep(0.1)
        first.kill()
    time.sleep(5)  # its actors end with it
    before = {file.name: file.stat().st_mtime_ns for file in (tmp_path / "out").glob("part-*.jsonl")}
    assert 2 <= len(before) < 10
    subprocess.run(fanned, check=True, timeout=900)
    files = sorted((tmp_path / "out").glob("part-*.jsonl"))
    assert all(file.stat().st_mtime_ns == before.get(file.name, file.stat().st_mtime_ns) for file in files)
    found = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    assert [row["id"] for row in found] == [row["id"] for row in rows]
    subprocess.run([*common, "--output", str(tmp_path / "alone")], check=True, timeout=900)
    alone = sorted((tmp_path / "alone").glob("part-*.jsonl"))
    assert [file.read_text() for file in files] == [file.read_text() for file in alone]
