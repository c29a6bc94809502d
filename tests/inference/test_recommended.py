"""A model's recommended settings: the same tokens as the settings spelled out, and the call's own word wins."""

import json
from pathlib import Path

import pytest

import dlm
from dlm.cli.infer import main as infer_command
from dlm.errors import UserError
from dlm.inference.config import SamplerConfig
from dlm.inference.recommended import with_recommended

from .tiny import text_lm

PROMPT, HOLES = ["import os\n", "def f"], ["def f(): [MASK:6]\n", "x = [MASK:5]"]
WARM = {"temperature": 1.0, "rule": "random", "top_k": 7}


def advised(generate: dict | None = None, infill: dict | None = None, **fields):
    lm = text_lm(**fields)
    lm.generation = {"dlm": {"generate": generate or {}, "infill": infill or {}}}
    return lm


def tokens(results) -> list[list[int]]:
    return [result.tokens for result in results]


def test_are_the_settings_of_a_call_that_says_nothing():
    lm, plain = advised(WARM, {"rule": "margin", "block_length": 2}), text_lm()
    spelled = tokens(dlm.generate(plain, PROMPT, gen_length=12, **WARM))
    assert tokens(dlm.generate(lm, PROMPT, gen_length=12)) == spelled
    assert spelled != tokens(dlm.generate(plain, PROMPT, gen_length=12))
    assert tokens(dlm.Engine(lm).generate(PROMPT, gen_length=12)) == spelled
    filled = tokens(dlm.infill(plain, HOLES, rule="margin", block_length=2))
    assert tokens(dlm.infill(lm, HOLES)) == filled != tokens(dlm.infill(plain, HOLES))


@pytest.mark.parametrize(
    "said", [{"temperature": 0.0}, {"rule": "low_confidence"}, {"remasking": "low_confidence"}, {"temperature": 0.5}]
)
def test_the_call_wins(said):
    found = tokens(dlm.generate(advised(WARM), PROMPT, gen_length=12, **said))
    left = {key: value for key, value in WARM.items() if key != ("rule" if "remasking" in said else next(iter(said)))}
    if said == {"temperature": 0.0}:
        left.pop("top_k")  # which nothing reads then: given by the call it would be an error, recommended it falls away
    assert found == tokens(dlm.generate(text_lm(), PROMPT, gen_length=12, **left, **said))


def test_a_block_that_does_not_fit_is_left_out():
    lm = advised({"block_length": 8})
    assert with_recommended(lm, SamplerConfig(gen_length=16), "generate").block_length == 8
    assert with_recommended(lm, SamplerConfig(gen_length=12), "generate").block_length is None
    assert with_recommended(lm, SamplerConfig(gen_length="auto"), "generate").block_length == 8


def test_holes_of_unknown_length_are_chosen_as_without():
    lm = advised(infill={"temperature": 1.0, "rule": "random"})
    chosen = [len(r.tokens) for r in dlm.infill(lm, ["x = [MASK:2-6]\ny = 1"])]
    assert chosen == [len(r.tokens) for r in dlm.infill(text_lm(), ["x = [MASK:2-6]\ny = 1"])]


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ([1], "expected an object"),
        ({"generat": {}}, "did you mean"),
        ({"generate": 3}, "expected an object of sampler settings"),
        ({"generate": {"temprature": 1}}, "temprature"),
        ({"generate": {"temperature": -1}}, "temperature"),
        ({"generate": {"seed": 1}}, "for each call to say"),
        ({"generate": {"top_k": 3}}, "top_k = 3 is only read"),
    ],
)
def test_mistakes_name_the_file_and_the_setting(table, words):
    lm = text_lm()
    lm.generation = {"dlm": table}
    with pytest.raises(UserError, match=r"generation_config\.json") as caught:
        dlm.generate(lm, ["a"], gen_length=4)
    assert words in str(caught.value)


def test_travel_with_the_folder_and_reach_the_command(tmp_path: Path, capsys):
    dlm.save(advised(WARM), tmp_path / "model")
    lm = dlm.load(tmp_path / "model", dtype="float32", device="cpu")
    expected = dlm.generate(lm, PROMPT[:1], gen_length=12, **WARM)[0]
    base = ["--model.name", str(tmp_path / "model"), "--prompt", PROMPT[0], "--sampler.gen_length", "12", "--json"]
    assert infer_command(base) == 0
    assert json.loads(capsys.readouterr().out)["tokens"] == expected.tokens
    assert infer_command([*base, "--sampler.temperature", "0", "--sampler.rule", "low_confidence"]) == 0
    cold = dlm.generate(text_lm(), PROMPT[:1], gen_length=12)[0]
    assert json.loads(capsys.readouterr().out)["tokens"] == cold.tokens
