"""Traffic over HTTP: what is counted, against a server whose times are known."""

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from dlm.bench.config import BenchConfig
from dlm.bench.run import measure, wanted
from dlm.config import check
from dlm.errors import UserError
from dlm.serving.client import Client, Refused


class Stub(BaseHTTPRequestHandler):
    """Three deltas, and usage; every third request is refused; `bad` breaks off."""

    protocol_version = "HTTP/1.0"
    count, lock, most, now = 0, threading.Lock(), 0, 0

    def log_message(self, *_) -> None: ...

    def do_GET(self) -> None:
        self._json(200, {"data": [{"id": "stub"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        with Stub.lock:
            Stub.count += 1
            Stub.now += 1
            Stub.most = max(Stub.most, Stub.now)
            refused = Stub.count % 3 == 0
        if refused:
            self._json(429, {"error": {"message": "full"}})
        else:
            self.send_response(200)
            self.end_headers()
            for number in range(3):
                time.sleep(0.01)
                self._chunk({"choices": [{"index": 0, "text": f"t{number}"}]})
            if body["prompt"] != "bad":
                self._chunk({"choices": [], "usage": {"completion_tokens": 7}})
                self.wfile.write(b": ping\n\ndata: [DONE]\n\n")
        with Stub.lock:
            Stub.now -= 1

    def _chunk(self, chunk: dict) -> None:
        self.wfile.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
        self.wfile.flush()

    def _json(self, status: int, body: dict) -> None:
        content = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


@pytest.fixture
def url():
    Stub.count = Stub.most = Stub.now = 0
    with ThreadingHTTPServer(("127.0.0.1", 0), Stub) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def settings(url: str, **more) -> BenchConfig:
    return check(BenchConfig, {"serve": {"url": url, "requests": 9, "warmup": 0, "plot": "none", **more}}, "the test")


def test_counts(url, tmp_path):
    config = settings(url, rates=[200.0], in_flight=[2], plot=str(tmp_path / "latency.png"))
    assert wanted(config, None) == ["serve"]
    finding = measure(config, "serve", lambda line: None)
    together, closed = finding.values["serve"]
    for run in (together, closed):
        assert (run["answered"], run["refused"], run["failed"]) == (6, 3, 0)
        assert run["throughput"] == pytest.approx(6 * 7 / run["seconds"])
        assert 0.01 <= run["first_p50"] < run["whole_p50"] and run["between_p50"] >= 0.009
        assert run["goodput"] == pytest.approx(run["requests_per_second"])
    assert Stub.most >= 2
    assert (tmp_path / "latency.png").read_bytes()[1:4] == b"PNG"


def test_what_comes_too_late_is_no_goodput(url):
    finding = measure(settings(url, rates=[], in_flight=[1], first_within=0.001), "serve", lambda line: None)
    (run,) = finding.values["serve"]
    assert run["answered"] == 6 and run["goodput"] == 0


def test_errors(url):
    client = Client(f"{url}/v1")
    assert client.model() == "stub"
    with pytest.raises(UserError, match="broke off before its end"):
        list(client.stream("/v1/completions", {"prompt": "bad"}))
    with pytest.raises(Refused, match="full"):
        [list(client.stream("/v1/completions", {"prompt": "a"})) for _ in range(3)]
    for wrong in ("ftp://x", "http://", "http://x:99999"):
        with pytest.raises(UserError, match="url = "):
            Client(wrong)
    with pytest.raises(UserError, match="is dlm-serve running"):
        Client("http://127.0.0.1:1").model()
    with pytest.raises(UserError, match="each must be above 0"):
        settings(url, rates=[0.0])
