"""Fills that become training data: what is kept, what is recorded of it, and work that goes on where it was."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch

import dlm
from dlm.config import load
from dlm.data.traces import document_of
from dlm.prepare import fillings
from dlm.prepare.config import FillingsConfig
from dlm.trace.facts import digest
from tests.inference.tiny import EOS, MASK, byte_tokenizer, text_lm, tiny_lm
from tests.refusals import refused, told

SOURCE = """import os

def area(radius):
    square = radius * radius
    return 3 * square

def first(items):
    for item in items:
        return item
    return None
"""
LINES = {line.strip() for line in SOURCE.splitlines() if len(line.strip()) >= 4}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    text_lm(attention="bidirectional").save(tmp_path / "model")
    text_lm(seed=1, attention="causal").save(tmp_path / "judge")
    for number in range(3):
        (tmp_path / f"{number}.py").write_text(SOURCE.replace("area", f"area_{number}"))
    return tmp_path


def config(folder: Path, **overrides: str) -> FillingsConfig:
    """A dozen holes, four at a time; `overrides` use __ for dots."""
    small = {"model.name": str(folder / "model"), "model.device": "cpu", "data.source": "text"}
    small |= {"data.paths": json.dumps([str(folder / "*.py")]), "data.heldout_fraction": "0"}
    small |= {
        "sampler.temperature": "1.0",
        "sampler.num_samples": "3",
        "fillings.holes": "12",
        "fillings.batch_size": "4",
    }
    small |= {
        "fillings.functions": "0",
        "fillings.check": "none",
        "fillings.truths": "1",
        "fillings.context": "[5, 500]",
    }
    small |= {"fillings.store": str(folder / "traces.db")}
    return load(FillingsConfig, [], small | {key.replace("__", "."): value for key, value in overrides.items()})


def traces(folder: Path) -> dict:
    with dlm.TraceStore(folder / "traces.db", create=False) as store:
        return {trace.request_id: trace for trace in store}


def offering(monkeypatch, *texts: str) -> None:
    """Every hole gets these fills; "$" is end-of-text and "?" a mask."""
    special, encode = {"$": [EOS], "?": [MASK]}, byte_tokenizer().encode
    made = [[token for c in text for token in special.get(c) or encode(c)] for text in texts]
    monkeypatch.setattr(fillings, "_fills", lambda lm, config, holes: [made for _ in holes])


def middle(lm: dlm.LM, trace) -> str:
    return lm.decode(trace.tokens[trace.steps >= 0].tolist())


def test_what_is_recorded_is_what_infill_writes_and_what_was_there(folder):
    done = fillings.fill(config(folder))
    assert (done.holes, done.kept, done.made) == (12, 12, 24)
    lm, found = dlm.load(folder / "model", device="cpu"), traces(folder)
    for name, trace in found.items():
        if name.endswith("-true"):
            assert re.sub(r"area_\d", "area", middle(lm, trace)) in LINES
            assert re.sub(r"area_\d", "area", lm.decode(trace.tokens.tolist())) in SOURCE
            continue
        seed = int.from_bytes(bytes.fromhex(name.split("-")[1])[:7], "big")
        canvas = np.where(trace.steps >= 0, MASK, trace.tokens)
        (result,) = dlm.infill(lm, [canvas.tolist()], temperature=1.0, seed=seed)
        assert result.tokens == trace.tokens[trace.steps >= 0].tolist()
        document = document_of(trace)
        assert document is not None and (document.prompt == (trace.steps < 0)).all()


def test_a_fill_is_kept_if_the_text_can_be_parsed(folder, monkeypatch):
    offering(monkeypatch, "(", "None$", "?", "None", "True")
    done = fillings.fill(config(folder, fillings__check="parses", fillings__truths="0"))
    lm, found = dlm.load(folder / "model", device="cpu"), traces(folder)
    assert 0 < done.kept == done.made == len(found)
    assert {middle(lm, trace) for trace in found.values()} == {"None"}
    offering(monkeypatch, "(", "None$", "?")
    with_none = config(folder, fillings__check="parses", fillings__store=str(folder / "none.db"))
    assert fillings.fill(with_none) == fillings.Filled(12, 0, 0)


def test_the_judge_takes_the_likeliest_of_those(folder, monkeypatch):
    """Against the sum of a causal network's log-probabilities over the fill and the sixteen tokens after it."""
    offers = ("abc", "a_b", "xyz", "x.y", "a(b")
    offering(monkeypatch, *offers)
    fillings.fill(config(folder, fillings__check="parses", fillings__truths="0", fillings__judge=str(folder / "judge")))
    lm, judge = dlm.load(folder / "model", device="cpu"), dlm.load(folder / "judge", device="cpu")
    chosen = set()
    for trace in traces(folder).values():
        start, first = trace.tokens.tolist(), int((trace.steps >= 0).argmax())
        if first == 0:  # then end-of-text stands before it
            start, first = [EOS, *start], 1
        costs = {}
        for offer in offers[:-1]:
            ids = [*start[:first], *lm.encode(offer), *start[first + 3 :]]
            with torch.inference_mode():
                logits = judge.network(torch.tensor([ids]))[0].double().numpy()
            p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
            costs[offer] = -sum(p[i - 1, ids[i]] for i in range(first, min(first + 19, len(ids))))
        assert middle(lm, trace) == min(costs, key=costs.__getitem__)
        chosen.add(middle(lm, trace))
    assert len(chosen) > 1


def test_a_stopped_run_goes_on_where_it_was(folder, monkeypatch):
    fillings.fill(config(folder, fillings__holes="5"))
    before = {name: digest(trace) for name, trace in traces(folder).items()}
    assert fillings.fill(config(folder)) == fillings.Filled(12, 12, 24 - len(before))
    after = {name: digest(trace) for name, trace in traces(folder).items()}
    assert before.items() <= after.items() and fillings.fill(config(folder)).made == 0
    fillings.fill(config(folder, sampler__seed="1", fillings__holes="1"))
    assert len(traces(folder)) > len(after)
    monkeypatch.setattr(fillings, "infillings", None)  # what is there is not even filled again
    assert fillings.fill(config(folder)).made == 0


def test_holes_are_as_they_were_asked_for(folder):
    wide = {"fillings__holes": "30", "fillings__as_long": "0", "fillings__truths": "0"}
    fillings.fill(config(folder, **wide, fillings__hole_tokens="[6, 7]", fillings__context="[3, 9]"))
    sizes = {(int((t.steps >= 0).sum()), int((t.steps >= 0).argmax())) for t in traces(folder).values()}
    assert {size for size, _ in sizes} == {6, 7} and {before for _, before in sizes} <= set(range(10))


def test_some_are_in_small_functions_alone(folder):
    fillings.fill(config(folder, fillings__functions="1", fillings__context="[500, 500]"))
    lm, found = dlm.load(folder / "model", device="cpu"), traces(folder)
    assert found and all(lm.decode(trace.tokens[:4].tolist()) == "def " for trace in found.values())


def test_refusals(folder):
    tiny_lm(attention="causal", mask_token_id=None).save(folder / "other")
    text_lm(attention="bidirectional").save(folder / "both")
    refused("is no autoregressive model", fillings.fill, config(folder, fillings__judge=str(folder / "both")))
    told("hole_tokens = [9, 3]", config, folder, fillings__hole_tokens="[9, 3]")
    told('data.source = "sudoku"', config, folder, data__source="sudoku", data__paths="[]")
    refused("sampler", config, folder, sampler__threshold="0.5")
    refused("\\[sampler\\] check", config, folder, sampler__check="python")
    for file in folder.glob("*.py"):
        file.write_text("not python (\n" * 9)
    refused("no text has a line of code", fillings.fill, config(folder))
