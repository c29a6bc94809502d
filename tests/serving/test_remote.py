"""`dlm-infer --url`: the same command, decoded by a server, says the same as here."""

import io
import json
import sys

import pytest

import dlm
from dlm.cli import infer


@pytest.fixture
def command(capsys, monkeypatch):
    def run(*argv: str, stdin: str = "") -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        status = infer.main(list(argv))
        return status, *capsys.readouterr()

    return run


def test_the_same_texts(diffusion, command):
    lm, url = diffusion.server.lm, diffusion.url
    status, out, _ = command("--url", url, "--prompt", "ab", "--sampler.gen_length", "8", "--quiet")
    assert status == 0 and out == dlm.generate(lm, ["ab"], gen_length=8)[0].text + "\n"
    options = ["--sampler.temperature", "0.9", "--sampler.seed", "4"]
    status, out, _ = command("--url", f"{url}/v1/", "--prompt", "a[MASK:3]b", *options, "--json")
    expected = dlm.infill(lm, ["a[MASK:3]b"], temperature=0.9, seed=4)[0]
    found = json.loads(out)
    assert (found["text"], found["holes"], found["nfe"]) == (expected.text, expected.holes, expected.nfe)
    samples = [*options, "--sampler.num_samples", "2", "--sampler.gen_length", "8", "--json"]
    status, out, _ = command("--url", url, "--prompt", "ab", *samples)
    both = dlm.generate(lm, ["ab"], gen_length=8, temperature=0.9, seed=4, num_samples=2)
    assert [json.loads(line)["text"] for line in out.splitlines()] == [result.text for result in both]


def test_a_conversation(diffusion, command):
    lm = diffusion.server.lm
    status, out, _ = command("--url", diffusion.url, "--chat", "--sampler.gen_length", "8", stdin="hi\n\nagain\n")
    messages = [{"role": "user", "content": "hi"}]
    first = dlm.generate(lm, messages, gen_length=8)[0].text
    messages += [{"role": "assistant", "content": first}, {"role": "user", "content": "again"}]
    assert status == 0 and out == f"{first}\n{dlm.generate(lm, messages, gen_length=8)[0].text}\n"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--prompt", "a", "--model", "other"], "no model 'other' here"),
        (["--prompt", "a", "--engine.cache", "dual"], "is the server's own with --url"),
        (["--prompt", "a", "--trace"], "is the server's own with --url"),
        (["--prompt", "a", "--draft.model", "self"], "is the server's own with --url"),
        (["--config", "quickstart"], "a Sudoku is solved where its model is"),
    ],
)
def test_mistakes(diffusion, command, options, words):
    if "quickstart" in options:
        options = [*options, "--model", "tiny"]
    status, out, err = command("--url", diffusion.url, *options)
    assert status == 2 and words in err


def test_nobody_there(command):
    status, _, err = command("--url", "http://127.0.0.1:1", "--prompt", "a")
    assert status == 2 and "is dlm-serve running there?" in err
