"""The page in Chromium: holes fill live, steps go back and forth, and nothing that anybody writes is ever run."""

import json
import os
import shutil
import time
from pathlib import Path

import pytest

from tests.serving.live import config, live, model

pytestmark = [pytest.mark.outside, pytest.mark.filterwarnings("default")]
api = pytest.importorskip("playwright.sync_api", reason="bash scripts/test --outside brings it")

SIZES = {"desktop": (1280, 860), "phone": (390, 844)}
EVIL = '<img src=x onerror="window.hit=1"><script>window.hit=1</script>{{7*7}}</textarea><svg onload=window.hit=1>'


@pytest.fixture(scope="module")
def browser():
    with api.sync_playwright() as p:
        chromium = p.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.fixture(params=SIZES)
def page(browser, request):
    """A page of a size, and what its console said; screenshots go where DLM_SCREENSHOTS says."""
    width, height = SIZES[request.param]
    context = browser.new_context(viewport={"width": width, "height": height})
    page = context.new_page()
    page.said = []
    page.on("console", lambda message: page.said.append(message.text))
    page.on("pageerror", lambda error: page.said.append(str(error)))
    yield page
    if folder := os.environ.get("DLM_SCREENSHOTS"):
        page.screenshot(path=Path(folder) / f"{request.node.name}.png", full_page=True)
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth"), "it scrolls sideways"
    assert page.said == []
    context.close()


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    store = str(tmp_path_factory.mktemp("store") / "traces.db")
    with live(config(trace={"enabled": True, "store": store}), model()) as running:
        yield running


def done(page) -> None:
    page.wait_for_selector("#go:not([disabled])", timeout=60_000)


def opened(page, running) -> None:
    page.goto(running.url)
    page.wait_for_selector(".dot.on")


def test_holes_fill_live(page, running, monkeypatch):
    stepper = running.server.runner.engine.batch.stepper
    step = stepper.run
    monkeypatch.setattr(stepper, "run", lambda scheduled: (time.sleep(0.3), step(scheduled))[1])
    opened(page, running)
    page.fill("#prompt", "a ▢▢▢ b [MASK:4] c \\[MASK] d")
    page.click("#go")
    page.wait_for_selector("#panes:has(.m):has(.t)", timeout=60_000)  # some are still open, while others are written
    done(page)
    monkeypatch.undo()
    expected = running.post({"prompt": "a [MASK:3] b [MASK:4] c \\[MASK] d", "infill": True}).json()
    assert page.locator("#panes .t").count() == 7 and page.locator("#panes .m").count() == 0
    assert page.locator("#said").text_content() == expected["choices"][0]["text"]
    assert page.locator("#at").get_attribute("max") == "7"
    page.evaluate(
        "() => { const at = document.getElementById('at'); at.value = 2; at.dispatchEvent(new Event('input')); }"
    )
    assert page.locator("#panes .t").count() == 2 and page.locator("#panes .m").count() == 5
    page.click("#play")
    page.wait_for_selector("#panes .m", state="detached", timeout=10_000)
    assert page.locator("#trace").get_attribute("href").startswith("/v1/traces/cmpl-")
    answer = running.client.get(page.locator("#trace").get_attribute("href"))
    assert answer.status_code == 200


def test_a_hole_of_unknown_length(page, running):
    opened(page, running)
    page.fill("#prompt", "a [MASK:2-5] b ▢")
    page.click("#go")
    done(page)
    expected = running.post({"prompt": "a [MASK:2-5] b [MASK]", "infill": True}).json()
    assert page.locator("#said").text_content() == expected["choices"][0]["text"]
    assert page.locator("#panes .t").count() == expected["usage"]["completion_tokens"]


def test_two_rules_side_by_side(page, running):
    opened(page, running)
    page.fill("#prompt", "abc")
    page.click("summary") if page.locator("#settings").get_attribute("open") is None else None
    page.fill("#max_tokens", "12")
    page.check("#compare")
    page.select_option("#b-rule", "threshold")
    page.fill("#b-threshold", "0.3")
    page.click("#go")
    done(page)
    titles = page.locator(".pane h2 b").all_text_contents()
    assert titles == ["low confidence", "threshold 0.3"]
    assert page.locator("#panes .t").count() == 24


def test_a_chat_by_keyboard(page, running):
    opened(page, running)
    page.focus("#tab-write")
    page.keyboard.press("ArrowRight")
    page.focus("#prompt")
    for words in ("hi", "and then?"):
        page.keyboard.type(words)
        page.keyboard.press("Enter")
        page.wait_for_selector("#go[disabled]")
        done(page)
    assert page.locator(".turn.user").all_text_contents() == ["hi", "and then?"]
    assert page.locator(".turn.assistant").count() == 2
    assert page.locator(".turn.assistant[aria-pressed=true]").count() == 1


def test_what_is_written_is_never_run(page, running):
    opened(page, running)
    page.fill("#prompt", f"{EVIL}▢▢")
    page.click("#go")
    done(page)
    page.click("#tab-chat")
    page.fill("#prompt", EVIL)
    page.keyboard.press("Enter")
    page.wait_for_selector("#go[disabled]")
    done(page)
    assert page.locator(".turn.user").text_content() == EVIL
    assert page.evaluate("window.hit") is None and page.locator("main img, main svg, main script").count() == 0


def test_what_a_model_writes_is_never_run(browser, running):
    """A model that writes markup and a server that sends it in every field."""
    context = browser.new_context()
    page = context.new_page()

    def answer(route):
        chunk = {"choices": [{"index": 0, "text": EVIL, "finish_reason": None}]}
        lines = [
            {**chunk, "dlm": {"prompt_tokens": 1, "holes": [[1, 3]], "seed": 1}},
            {
                **chunk,
                "dlm": {"step": 0, "nfe": 1, "commit": [[1, 5, EVIL, 0.5]], "edit": [[2, 6, EVIL, 0.5]], "remask": []},
            },
            {**chunk, "dlm": {"nfe": 1, "tpf": 1.0, "trace": f'"><script>window.hit=1</script>{EVIL}'}},
            {"error": {"message": EVIL}},
        ]
        text = "".join(f"data: {json.dumps(line)}\n\n" for line in lines)
        route.fulfill(status=200, body=text, headers={"content-type": "text/event-stream"})

    page.route("**/v1/completions", answer)
    opened(page, running)
    page.fill("#prompt", "a")
    page.click("#go")
    page.wait_for_selector("#bad:not([hidden])")
    assert page.locator("#bad").text_content() == EVIL
    assert page.evaluate("window.hit") is None and page.locator("main img, main svg, main script").count() == 0
    context.close()


def test_a_refusal_is_shown(page, running):
    opened(page, running)
    page.fill("#prompt", "abc")
    page.click("summary") if page.locator("#settings").get_attribute("open") is None else None
    page.fill("#a-temperature", "0")
    page.evaluate("() => { document.getElementById('max_tokens').removeAttribute('max'); }")
    page.fill("#max_tokens", "99999")
    page.click("#go")
    page.wait_for_selector("#bad:not([hidden])")
    assert "gives 4096 at most" in page.locator("#bad").text_content()
    page.said.clear()  # the browser notes a 400, too
