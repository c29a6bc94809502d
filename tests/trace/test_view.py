"""What is shown of traces: pieces of tokens against the `tokenizers` library, differences, and the page, in a browser too."""

import json
import re
import shutil
import subprocess

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from dlm.trace import diff, from_states, page, view
from dlm.trace.pieces import Pieces
from tests.refusals import refused
from tests.trace.conftest import PIECES
from tests.trace.synthetic import run

BROWSER = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome", "chrome") if (path := shutil.which(name))), None
)


def in_a_browser(test):
    return pytest.mark.slow(pytest.mark.skipif(BROWSER is None, reason="needs a Chromium")(test))


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
    command = [BROWSER, *options, f"--window-size={width},800", "--virtual-time-budget=2000", file.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert "FOUND" in done.stdout, done.stderr[-2000:]
    found = re.findall("FOUND(.*?)FOUND", done.stdout, re.S)[-1]
    return json.loads(found.replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&"))


@in_a_browser
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


@in_a_browser
def test_a_browser_shows_two_side_by_side_and_on_a_small_screen(filled, tmp_path):
    a, b = filled["first"], filled["second"]
    found = browse(page(a, b), b.states(), tmp_path, side=1, width=500)
    assert found["errors"] == [] and all(found["states"]) and not found["wide"]
    apart = diff(a, b)
    assert found["parts"] == apart.shared_states
    assert f"{apart.counts[-1]} of {a.length} positions differ at the end" in found["parting"]


@in_a_browser
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


def made(states, **facts):
    return from_states("x", states, 0, **facts)


def test_where_two_traces_part():
    a = made([[1, 0, 0], [1, 5, 0], [1, 5, 6]], own={"seed": 1}, context={"sampler": {"temperature": 0.0}})
    b = made([[1, 0, 0], [1, 5, 0], [1, 5, 7], [1, 8, 7]], own={"seed": 2}, context={"sampler": {"temperature": 0.0}})
    found = diff(a, b)
    assert not found.identical
    assert (found.first.step, found.first.position, found.first.a, found.first.b) == (1, 2, 6, 7)
    assert found.counts == (0, 0, 1, 2)
    assert found.shared_states == 2
    assert found.facts == {"seed": (1, 2)}
    assert "they part at step 1, position 2: 6 / 7" in str(found)


def test_the_same_trace_is_identical():
    a = made([[1, 0, 0], [1, 5, 0], [1, 5, 6]])
    assert diff(a, a).identical and str(diff(a, a)) == "identical at 2 of 2 steps"


def test_lengths_and_steps_count_too():
    short, long = made([[1, 0], [1, 2]]), made([[1, 0], [1, 2], [1, 2, 3]])
    assert diff(short, long).first == type(diff(short, long).first)(step=1, position=2, a=None, b=3)
    waits = made([[1, 0], [1, 2], [1, 2]])
    assert diff(short, waits).first is None and not diff(short, waits).identical
    other = made([[4, 0], [4, 2]])
    assert diff(short, other).first.step == -1
    assert "at the start" in str(diff(short, other))


def test_every_single_change_is_found():
    rng = np.random.default_rng(0)
    states = [np.zeros(9, np.int32)]
    for position in rng.permutation(9):
        states.append(states[-1].copy())
        states[-1][position] = 5
    a = made(states)
    for step in range(1, 10):
        for position in np.flatnonzero(states[step] != states[step - 1]):
            changed = [state.copy() for state in states]
            for later in changed[step:]:
                later[position] = 6
            first = diff(a, made(changed)).first
            assert (first.step, first.position) == (step - 1, position)


TEXT = "def naïve(x):\n    return “x” — 猫 🐈\n\tprint('ok')  # done\n" * 3


def byte_level() -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["[MASK]"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    return tokenizer


def test_byte_level_pieces_are_what_the_library_decodes():
    tokenizer = byte_level()
    pieces = Pieces.of_tokenizer(tokenizer.to_str())
    ids = tokenizer.encode(TEXT).ids
    assert len(pieces) == tokenizer.get_vocab_size()
    assert pieces.text(ids) == TEXT
    assert b"".join(pieces[i] for i in ids) == TEXT.encode()
    assert pieces.text([0, *ids[:3]], mask_id=0).startswith("░def")
    assert pieces.text([0, 99_999, -2]) == "[MASK]�▒"


def test_sentencepiece_like_pieces():
    vocab = {"<unk>": 0, "▁the": 1, "▁cat": 2, "s": 3, "<0xE2>": 4, "<0x82>": 5, "<0xAC>": 6}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>"))
    pieces = Pieces.of_tokenizer(tokenizer.to_str())
    assert pieces.text([1, 2, 3, 4, 5, 6]) == " the cats€"


def test_bytes_and_back():
    pieces = Pieces.of_tokenizer(byte_level().to_str())
    back = Pieces.from_bytes(pieces.to_bytes())
    assert [back[i] for i in range(len(back))] == [pieces[i] for i in range(len(pieces))]
    assert len(Pieces.from_bytes(Pieces.of([]).to_bytes())) == 0


@pytest.mark.parametrize("text", ["{}", '{"model": {"vocab": 3}}', "{"])
def test_what_is_no_tokenizer(text, tmp_path):
    refused("cannot be understood", Pieces.of_tokenizer, text)
    refused("no tokenizer.json", Pieces.of_tokenizer, tmp_path)
