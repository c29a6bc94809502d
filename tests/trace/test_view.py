"""The page: data that cannot break out of it, and, where there is a browser, that it shows what was recorded."""

import json
import re
import shutil
import subprocess

import numpy as np
import pytest

from dlm.trace import diff, page, view
from tests.refusals import refused
from tests.trace.conftest import PIECES
from tests.trace.synthetic import run

BROWSER = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome", "chrome") if (path := shutil.which(name))), None
)
CHECK = """
<script>
const found = {errors: window.failures, states: [], keys: []};
const states = JSON.parse(document.getElementById("expected").textContent);
states.forEach((state, k) => { view.show(k); found.states.push(JSON.stringify(view.canvas(SIDE)) === JSON.stringify(state)); });
const press = key => { dispatchEvent(new KeyboardEvent("keydown", {key})); found.keys.push(view.step); };
["Home", "ArrowRight", "ArrowRight", "ArrowLeft", "End"].forEach(press);
const slider = document.getElementById("step"); slider.value = 2; slider.dispatchEvent(new Event("input")); found.slider = view.step;
found.text = document.querySelectorAll(".text")[SIDE].textContent;
const apart = document.querySelector(".parting"); if (apart) { found.parting = apart.textContent; apart.firstChild.click(); found.parts = view.step; }
const token = document.querySelector(".t:not(.mask)"); token.dispatchEvent(new PointerEvent("pointerover", {bubbles: true}));
found.tip = document.getElementById("tip").textContent; found.wide = document.documentElement.scrollWidth > innerWidth;
document.body.replaceChildren(); document.title = "done"; document.body.textContent = "FOUND" + JSON.stringify(found) + "FOUND";
</script>
"""


def browse(html: str, states: np.ndarray, tmp_path, side: int = 0, width: int = 1000) -> dict:
    """What the page does in a browser that is asked to step through it."""
    failures = "<script>window.failures = []; onerror = message => failures.push(String(message)); console.error = onerror;</script>"
    expected = f'<script type="application/json" id="expected">{json.dumps(states.tolist())}</script>'
    file = tmp_path / "page.html"
    html = html.replace("<head>", f"<head>{failures}", 1)
    file.write_text(html.replace("</body>", expected + CHECK.replace("SIDE", str(side)) + "</body>"), "utf-8")
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--dump-dom", f"--user-data-dir={tmp_path / 'profile'}"]
    done = subprocess.run(
        [BROWSER, *options, f"--window-size={width},800", "--virtual-time-budget=2000", file.as_uri()],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert "FOUND" in done.stdout, done.stderr[-2000:]
    found = re.findall("FOUND(.*?)FOUND", done.stdout, re.S)[-1]
    return json.loads(found.replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&"))


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="needs a Chromium")
def test_a_browser_shows_every_recorded_state(filled, tmp_path):
    trace = filled["first"]
    found = browse(page(trace), trace.states(), tmp_path)
    assert found["errors"] == []
    assert found["states"] == [True] * (trace.num_steps + 1)
    assert found["keys"] == [0, 1, 2, 1, trace.num_steps]
    assert found["slider"] == 2
    ends = [PIECES.text([token], 3) for token in trace.tokens.tolist()]
    shown = [PIECES.text([token]) for token in trace.state(2).tolist()]
    # A mask is as wide as what will stand there.
    assert found["text"] == "".join(
        "░" * len(end) if text == "[MASK]" else text for text, end in zip(shown, ends, strict=True)
    )
    assert "position" in found["tip"]
    assert not found["wide"]


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="needs a Chromium")
def test_a_browser_shows_two_side_by_side_and_on_a_small_screen(filled, tmp_path):
    a, b = filled["first"], filled["second"]
    found = browse(page(a, b), b.states(), tmp_path, side=1, width=500)
    assert found["errors"] == [] and all(found["states"]) and not found["wide"]
    apart = diff(a, b)
    assert found["parts"] == apart.shared_states
    assert f"{apart.counts[-1]} of {a.length} positions differ at the end" in found["parting"]


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="needs a Chromium")
def test_a_browser_shows_growing_canvases_drafts_and_runners_up(tmp_path):
    made = run(
        np.random.default_rng(5), 40, 9, prompt=3, grows=True, edits=0.1, remasks=0.1, drafts=0.5, keep=("topk",)
    )
    found = browse(page(made.trace), made.padded(), tmp_path)
    assert found["errors"] == [] and all(found["states"])


def test_nothing_in_a_trace_breaks_out_of_the_page(filled):
    trace = filled["first"]
    trace.request_id = "</title><script>alert(1)</script>\u2028"
    trace.own = {"note": "</script><img src=x onerror=alert(1)>"}
    html = page(trace)
    assert "<script>alert" not in html and "<img" not in html
    data = re.search(r'id="data">(.*?)</script>', html, re.S)[1]
    assert "<" not in data and json.loads(data)[0]["id"] == trace.request_id


def test_the_page_asks_the_network_for_nothing(filled):
    html = page(filled["first"])
    assert not re.search(r"https?://", html)
    assert "default-src 'none'" in html
    assert "srcdoc=" in filled["first"]._repr_html_()


def test_what_is_too_long_for_a_page(monkeypatch, filled):
    monkeypatch.setattr(view, "MOST", 10)
    refused("too many for a page", page, filled["first"])
