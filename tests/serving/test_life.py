"""Clients that leave, read slowly or come in crowds; steps that fail; signals. Nothing is left behind, nothing is lost."""

import asyncio
import contextlib
import io
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

import dlm
from dlm.serving import answer as answers
from dlm.serving.log import RequestLog

from .live import config, live, soon, streamed

LONG = {"prompt": "abc", "max_tokens": 400, "block_length": 4, "steps": 400, "temperature": 1.0, "seed": 1}


def raw(url: str, body: dict) -> socket.socket:
    """A connection on which this request was sent."""
    host, port = url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)))
    content = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(content)}\r\n\r\n"
    connection.sendall(head.encode() + content)
    return connection


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_ends_its_request(stream):
    with live() as running:
        expected = running.text({"prompt": "x", "max_tokens": 8})
        running.slow(0.01)
        connection = raw(running.url, {**LONG, "stream": stream})
        assert soon(lambda: running.server.runner.stats().running == 1)
        connection.close()
        assert soon(running.settled)
        assert running.server.runner.stats().finished == 1
        assert running.text({"prompt": "x", "max_tokens": 8}) == expected


def test_a_hundred_clients_that_leave_at_random_moments():
    draw = random.Random(1)
    with live(config(engine={"max_num_requests": 4}, serve={"max_waiting": 200})) as running:
        threads, files = threading.active_count(), len(os.listdir("/proc/self/fd"))

        def one(number: int) -> None:
            body = {**LONG, "max_tokens": 60, "steps": 60, "stream": number % 2 == 0, "seed": number}
            connection = raw(running.url, body)
            time.sleep(draw.random() * 0.3)
            if number % 3 == 0:
                with contextlib.suppress(OSError):
                    connection.recv(draw.randint(1, 300))
            connection.close()

        with ThreadPoolExecutor(16) as pool:
            list(pool.map(one, range(100)))
        assert soon(running.settled)
        assert soon(lambda: threading.active_count() <= threads + 1)
        assert soon(lambda: len(os.listdir("/proc/self/fd")) <= files + 1)
        assert running.client.get("/ready").status_code == 200


def test_a_slow_reader_holds_nobody_and_is_cut_off(monkeypatch):
    """While its socket takes nothing more, others get their answers; then it ends, and what it asked for, too."""
    told = answers.Answer._chunks

    async def full(self, chunks, send, end=b""):
        if self.ask.body.stream_mode == "denoise":
            await asyncio.sleep(3600)
        await told(self, chunks, send, end)

    monkeypatch.setattr(answers.Answer, "_chunks", full)
    monkeypatch.setattr(answers, "PARTING", 0.1)
    with live(config(serve={"max_unread": 16})) as running:
        running.slow(0.01)
        connection = raw(running.url, {**LONG, "stream": True, "stream_mode": "denoise"})
        assert soon(lambda: running.server.runner.stats().running == 1)
        assert running.text({"prompt": "x", "max_tokens": 8}) and streamed(
            running.chunks({"prompt": "x", "max_tokens": 8})
        )
        assert soon(running.settled)
        assert running.server.runner.stats().finished == 2
        connection.settimeout(20)
        while connection.recv(4096):  # the server hangs up
            pass
        connection.close()


def test_too_many_are_refused_and_the_others_answered():
    with (
        live(config(engine={"max_num_requests": 2}, serve={"max_waiting": 3})) as running,
        ThreadPoolExecutor(40) as pool,
    ):
        answer = list(
            pool.map(lambda seed: running.post({**LONG, "max_tokens": 24, "steps": 24, "seed": seed}), range(40))
        )
        codes = [each.status_code for each in answer]
        assert set(codes) == {200, 429} and codes.count(200) >= 5
        refused = next(each for each in answer if each.status_code == 429)
        assert refused.headers["retry-after"] == "1" and refused.json()["error"]["code"] == "queue_full"
        for seed, each in enumerate(answer):
            if each.status_code == 200:
                settings = {"gen_length": 24, "block_length": 4, "steps": 24, "temperature": 1.0}
                expected = dlm.generate(running.server.lm, ["abc"], seed=seed, **settings)[0].text
                assert each.json()["choices"][0]["text"] == expected
        assert soon(running.settled)


def test_where_nobody_may_wait_those_run_that_there_is_room_for():
    with live(config(engine={"max_num_requests": 2}, serve={"max_waiting": 0})) as running:
        body = {"prompt": "ab[MASK:2-4]cd", "infill": True}
        assert running.text(body) == dlm.infill(running.server.lm, [body["prompt"]])[0].text
        refused = running.post({"prompt": "a", "n": 3, "temperature": 1.0})
        assert refused.status_code == 400 and "room for 2" in refused.json()["error"]["message"]
        assert len(running.post({"prompt": "a", "n": 2, "temperature": 1.0, "max_tokens": 4}).json()["choices"]) == 2
        assert soon(running.settled)


def test_who_waits_too_long_is_refused():
    with live(config(engine={"max_num_requests": 1}, serve={"max_wait": 0.2})) as running:
        running.slow(0.01)
        first = raw(running.url, LONG)
        assert soon(lambda: running.server.runner.stats().running == 1)
        for stream in (True, False):
            refused = running.post({"prompt": "a", "stream": stream})
            assert refused.status_code == 429 and "0.2 s" in refused.json()["error"]["message"]
        first.close()
        assert soon(running.settled)


def test_who_takes_too_long_is_ended():
    with live(config(serve={"timeout": 0.4})) as running:
        running.slow(0.01)
        refused = running.post(LONG)
        assert refused.status_code == 503 and refused.json()["error"]["code"] == "timeout"
        assert refused.headers["x-should-retry"] == "false"
        with running.client.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as response:
            *_, last = [line for line in response.iter_lines() if line.startswith("data")]
        assert response.status_code == 200 and "not finished within" in last
        assert soon(running.settled)


def test_a_failing_step_fails_those_in_it(monkeypatch):
    said = io.StringIO()
    with live() as running:
        running.server.log = RequestLog(True, said)
        engine = running.server.runner.engine
        step, left = engine.batch.stepper.run, [1]

        def run(scheduled):
            if left[0] and any(item.sequence.step == 2 for item in scheduled):
                left[0] -= 1
                raise RuntimeError("out of memory")
            return step(scheduled)

        monkeypatch.setattr(engine.batch.stepper, "run", run)
        failed = running.post({"prompt": "a", "max_tokens": 8})
        assert failed.status_code == 500 and "out of memory" in failed.json()["error"]["message"]
        left[0] = 1
        with running.client.stream(
            "POST", "/v1/completions", json={"prompt": "a", "max_tokens": 8, "stream": True}
        ) as response:
            *_, last = [line for line in response.iter_lines() if line.startswith("data")]
        assert "error" in json.loads(last[6:])
        assert running.post({"prompt": "a", "max_tokens": 8}).status_code == 200
        assert running.settled() and running.server.failure is None
        assert said.getvalue().count('"step failed"') == 2


def test_steps_that_always_fail_end_the_server(monkeypatch):
    with live() as running:

        def run(scheduled):
            raise RuntimeError("the device is lost")

        monkeypatch.setattr(running.server.runner.engine.batch.stepper, "run", run)
        for _ in range(2):
            assert running.post({"prompt": "a", "max_tokens": 8}).status_code == 500
        assert soon(lambda: running.server.failure is not None)
        assert running.client.get("/health").status_code == 500
        assert running.post({"prompt": "a"}).status_code == 503


def test_draining_refuses_new_ones_and_finishes_the_others():
    with live() as running, ThreadPoolExecutor(1) as pool:
        running.slow(0.01)
        first = pool.submit(running.chunks, {**LONG, "max_tokens": 100, "steps": 100})
        assert soon(lambda: running.server.runner.stats().running == 1)
        running.server.draining = True
        assert running.client.get("/ready").status_code == 503
        assert running.client.get("/health").status_code == 200
        assert running.post({"prompt": "a"}).status_code == 503
        settings = {"gen_length": 100, "block_length": 4, "steps": 100, "temperature": 1.0, "seed": 1}
        assert streamed(first.result()) == dlm.generate(running.server.lm, ["abc"], **settings)[0].text


def test_a_silent_stream_is_kept_alive(monkeypatch):
    monkeypatch.setattr(answers, "SILENCE", 0.05)
    with live() as running:
        running.slow(0.2)
        with running.client.stream(
            "POST", "/v1/completions", json={"prompt": "a", "max_tokens": 3, "stream": True}
        ) as response:
            text = response.read().decode()
        assert ": ping\n\n" in text and text.endswith("data: [DONE]\n\n")


def test_the_log_tells_no_text_unless_asked():
    for wanted in (False, True):
        said = io.StringIO()
        with live(config(serve={"log_text": wanted})) as running:
            running.server.log = RequestLog(True, said)
            text = running.text({"prompt": "secret", "max_tokens": 4, "seed": 1})
            running.post({"prompt": "secret", "max_tokens": 0})
            running.client.get("/health")
        lines = [json.loads(line) for line in said.getvalue().splitlines()]
        assert [line["status"] for line in lines] == [200, 400]
        assert lines[0]["completion_tokens"] == 4 and lines[0]["finish_reasons"] == ["length"]
        assert ("secret" in said.getvalue()) is wanted and (lines[0].get("text") == [text]) is wanted


def test_metrics_count():
    with live() as running:
        gaps = 0
        for seed in range(3):
            body = {"prompt": "a", "max_tokens": 4, "block_length": 1, "temperature": 1.0, "seed": seed}
            gaps += sum(bool(chunk["choices"][0]["text"]) for chunk in running.chunks(body)) - 1
        running.post({"prompt": "a", "max_tokens": 0})
        lines = running.client.get("/metrics").text.splitlines()
        counts = {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines) if name[0] != "#"}
        assert counts['dlm_requests_total{status="200"}'] == 3 and counts['dlm_requests_total{status="400"}'] == 1
        assert counts["dlm_tokens_total"] == 12 == counts["dlm_forwards_total"]
        assert counts["dlm_delta_seconds_count"] == gaps > 0
        assert counts["dlm_queue_seconds_count"] == counts["dlm_first_block_seconds_count"] == 3
        assert counts['dlm_pages{state="used"}'] == counts["dlm_running"] == counts["dlm_waiting"] == 0


def test_what_was_answered_is_in_the_store(tmp_path):
    """At once, though the store writes in groups; also of what a cap cut, and of streams."""
    path = str(tmp_path / "traces.db")
    with live(config(trace={"enabled": True, "store": path})) as running:
        for body in ({"max_tokens": 5, "block_length": 4}, {"max_tokens": 8}):
            answer = running.post({"prompt": "ab", **body}).json()
            trace = dlm.TraceStore(path, create=False)[answer["dlm"]["trace"]]
            assert trace.num_steps >= body["max_tokens"] and trace.meta["seed"] == answer["dlm"]["seed"]
        last = running.chunks({"prompt": "ab", "max_tokens": 4})[-1]
        assert dlm.TraceStore(path, create=False)[last["dlm"]["trace"]].num_steps == 4
        assert "trace" not in running.post({"prompt": "ab", "max_tokens": 4, "trace": False}).json()["dlm"]
        assert len(running.server.store) == 3
        shown = running.client.get(f"/v1/traces/{last['dlm']['trace']}/page")
        assert "sandbox" in shown.headers["content-security-policy"]


@pytest.mark.slow
def test_the_command():
    """One line when it is ready, requests on its own port, and on SIGTERM an end with status 0 that cuts nothing."""
    command = [sys.executable, "-m", "dlm.cli.serve", "--model", "pico", "--serve.port", "0", "--serve.log", "false"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        line = process.stdout.readline()
        assert line.startswith("dlm-serve: pico at http://127.0.0.1:")
        url = line.split()[-1]
        assert httpx.get(f"{url}/ready").status_code == 200
        assert httpx.get(f"{url}/v1/models").json()["data"][0]["id"] == "pico"
        body = {"prompt": "import", "max_tokens": 256, "seed": 1}
        with ThreadPoolExecutor(4) as pool:
            under_way = [pool.submit(httpx.post, f"{url}/v1/completions", json=body, timeout=60) for _ in range(4)]
            assert soon(lambda: "dlm_running 4" in httpx.get(f"{url}/metrics").text)
            process.send_signal(signal.SIGTERM)
            answer = [each.result() for each in under_way]
        assert [each.status_code for each in answer] == [200] * 4
        assert len({each.json()["choices"][0]["text"] for each in answer}) == 1
        assert process.wait(30) == 0
        assert process.stdout.read() == "" and process.stderr.read() == ""


@pytest.mark.slow
def test_a_killed_server_keeps_what_it_answered(tmp_path):
    """Killed in the midst of many requests, with a store: who had an answer finds its trace, before and after a restart."""
    store, answered = str(tmp_path / "traces.db"), []
    command = [sys.executable, "-m", "dlm.cli.serve", "--model", "pico", "--serve.port", "0", "--serve.log", "false"]
    command += ["--trace", "--trace.store", store, "--engine.max_num_requests", "4"]

    def ask(process: subprocess.Popen, url: str, number: int, most: int) -> None:
        body = {"prompt": "a", "max_tokens": 1 + number % 5}
        with contextlib.suppress(httpx.HTTPError), httpx.Client(base_url=url, timeout=60) as client:
            while True:
                answer = client.post("/v1/completions", json=body).json()
                answered.append((answer["dlm"]["trace"], answer["usage"]["completion_tokens"]))
                if len(answered) >= most:  # at once: a moment later even what nobody waited for is written
                    process.kill()

    for most in (16, 24):
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process, ThreadPoolExecutor(8) as pool:
            assert process.stdout is not None
            url = process.stdout.readline().split()[-1]
            for name, _ in answered:
                assert httpx.get(f"{url}/v1/traces/{name}").json()["id"] == name
            list(pool.map(ask, [process] * 8, [url] * 8, range(8), [most] * 8))
        traces = dlm.TraceStore(store, create=False)
        assert all(traces[name].num_steps >= tokens for name, tokens in answered)
        traces.close()


@pytest.mark.slow
def test_mistakes_of_the_command():
    taken = socket.create_server(("127.0.0.1", 0))
    port = str(taken.getsockname()[1])
    for options, words in (
        (["--serve.port", port], "give another --serve.port"),
        (["--serve.host", "no.such.host.invalid"], "give an address of this machine"),
        (["--serve.api_keys_file", "no-such-file"], "no-such-file"),
    ):
        command = [sys.executable, "-m", "dlm.cli.serve", "--serve.port", "0", *options]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert done.returncode == 2 and words in done.stderr and "Traceback" not in done.stderr
    taken.close()
