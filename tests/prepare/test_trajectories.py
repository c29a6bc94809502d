"""Preparing trajectories: orders against a sampler of a few lines, and work that was interrupted anywhere."""

import json
import signal
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import tokenizers
import torch

import dlm
from dlm.config import load, to_toml
from dlm.data.tokenizer import Tokenizer
from dlm.inference.engine import Engine
from dlm.prepare.config import TrajectoriesConfig
from dlm.prepare.trajectories import prepare
from dlm.sudoku import sudoku_tokenizer
from dlm.trace.facts import digest
from tests.inference.tiny import EOS, text_lm, tiny_lm
from tests.refusals import refused

TEXTS = [f"{i * 111} is the number {i}" for i in range(10)]
PROMPT, LENGTH = 4, 20  # of at least 16 tokens in each text, up to twelve are the answer: three blocks


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    text_lm(attention="bidirectional").save(tmp_path / "model")
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return tmp_path


def config(folder: Path, store: str = "traces.db", **overrides: str) -> TrajectoriesConfig:
    """Ten prompts, four at a time; `overrides` use __ for dots."""
    small = {"model.name": str(folder / "model"), "model.device": "cpu", "data.source": "jsonl"}
    small |= {"data.paths": json.dumps([str(folder / "texts.jsonl")]), "data.pack": "row", "data.heldout_fraction": "0"}
    small |= {"sampler.rule": "entropy_threshold", "sampler.entropy_threshold": "1.5", "sampler.gen_length": "12"}
    small |= {"sampler.block_length": "4", "trajectories.length": str(LENGTH)}
    small |= {"trajectories.prompt_length": str(PROMPT), "trajectories.batch_size": "4"}
    small |= {"trajectories.store": str(folder / store)}
    return load(TrajectoriesConfig, [], small | {key.replace("__", "."): value for key, value in overrides.items()})


def traces(store: Path) -> dict:
    with dlm.TraceStore(store, create=False) as opened:
        return {trace.request_id: trace for trace in opened}


def contents(store: Path) -> dict[str, bytes]:
    return {name: digest(trace) for name, trace in traces(store).items()}


def ids_of(lm: dlm.LM, text: str) -> list[int]:
    return [*lm.encode(text), EOS][:LENGTH]


def test_free_answers_are_what_generate_writes(folder):
    done = prepare(config(folder))
    assert (done.prompts, done.trajectories, done.made) == (10, 10, 10)
    lm = dlm.load(folder / "model", device="cpu")
    prompts = [ids_of(lm, text)[:PROMPT] for text in TEXTS]
    settings = {"gen_length": 12, "block_length": 4, "rule": "entropy_threshold", "entropy_threshold": 1.5}
    # Prompts that are alike are one piece of work.
    made = {tuple(p): r for p, r in zip(prompts, dlm.generate(lm, prompts, **settings), strict=True)}
    found = {tuple(t.tokens[:PROMPT].tolist()): t for t in traces(folder / "traces.db").values()}
    assert found.keys() == made.keys()
    for prompt, trace in found.items():
        n = len(made[prompt].tokens)
        assert trace.tokens[PROMPT : PROMPT + n].tolist() == made[prompt].tokens
        assert trace.steps[PROMPT : PROMPT + n].tolist() == made[prompt].steps


@pytest.mark.parametrize("length", ["4", "all"])
def test_prompts_of_free_answers_begin_as_the_tokenizer_has_texts_begin(folder, length):
    lm = text_lm(attention="bidirectional")
    backend = lm.require_tokenizer().backend
    end = [("<|endoftext|>", EOS)]
    backend.post_processor = tokenizers.processors.TemplateProcessing(single="<|endoftext|> $A", special_tokens=end)
    lm.save(folder / "model")
    prepare(config(folder, trajectories__prompt_length=length, trajectories__length="40"))
    shown = [[EOS, *lm.encode(text)[: int(length) if length != "all" else None]] for text in TEXTS]
    found = traces(folder / "traces.db").values()
    assert {tuple(t.tokens[: t.prompt_length].tolist()) for t in found} == set(map(tuple, shown))


def forced_order(lm: dlm.LM, ids: list[int], start: int, threshold: float, size: int) -> list[int]:
    """When each token of the answer is committed, if the least uncertain positions of each block come first."""
    canvas = torch.tensor([ids[:start] + [lm.mask_id] * (len(ids) - start)])
    order, step = [-1] * len(ids), 0
    for first in range(start, len(ids), size):
        missing = list(range(first, first + size))
        while missing:
            with torch.no_grad():
                p = lm.network(canvas)[0].double().softmax(-1)
            entropy = {i: -(p[i] * p[i].log()).sum().item() for i in missing}
            surest = min(missing, key=lambda i: (entropy[i], i))
            for i in [i for i in missing if entropy[i] <= threshold or i == surest]:
                order[i], canvas[0, i] = step, ids[i]
                missing.remove(i)
            step += 1
    return order


@pytest.mark.parametrize("size", [4, 1])
def test_forced_answers_keep_their_tokens_in_the_order_the_teacher_is_sure_of(folder, size):
    """Blocks of one token are the order from left to right."""
    done = prepare(config(folder, sampler__block_length=str(size), trajectories__responses="forced"))
    lm = dlm.load(folder / "model", device="cpu")
    found = {tuple(trace.tokens.tolist()): trace for trace in traces(folder / "traces.db").values()}
    assert done.made == len(found)
    for text in TEXTS:
        ids = ids_of(lm, text)[: PROMPT + 12]
        trace = found[tuple(ids)]
        assert trace.steps.tolist() == forced_order(lm, ids, PROMPT, 1.5, size)
        assert trace.own["responses"] == "forced" and trace.prompt_length == PROMPT
    if size == 1:
        assert all(trace.steps[PROMPT:].tolist() == list(range(12)) for trace in found.values())


FAMILIES = {
    "block_causal": {"model_type": "sdar", "attention": "block_causal", "block_length": 4, "qk_norm": True},
    "causal": {"model_type": "qwen3", "attention": "causal", "shifted_logits": True, "qk_norm": True},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_forced_answers_keep_their_tokens_in_every_family(folder, family):
    text_lm(**FAMILIES[family]).save(folder / "other")
    options = {"model__name": str(folder / "other"), "trajectories__prompt_length": "6"}
    prepare(config(folder, trajectories__responses="forced", **options))
    lm = dlm.load(folder / "other", device="cpu")
    found = {tuple(trace.tokens[:18].tolist()): trace for trace in traces(folder / "traces.db").values()}
    assert found.keys() == {tuple(ids_of(lm, text)[:18]) for text in TEXTS}
    for trace in found.values():
        order = trace.steps[6:]
        # Blocks of four lie at multiples of four: the first has two places left, the last goes on behind the answer.
        blocks = [order[:2], order[2:6], order[6:10], order[10:14]] if family == "block_causal" else order[:, None]
        assert all(a.max() < b.min() for a, b in pairwise(blocks))
        assert trace.tokens[18:].tolist() == [EOS] * (trace.length - 18)


def test_steps_are_a_blocks_share_for_answers_of_any_length(folder):
    (folder / "texts.jsonl").write_text("".join(json.dumps({"text": "x" * n}) + "\n" for n in (8, 12, 16)))
    settings = {"sampler__rule": "low_confidence", "sampler__entropy_threshold": "0.5", "sampler__steps": "6"}
    prepare(config(folder, trajectories__responses="forced", **settings))
    # With end-of-text 5, 9 and 13 tokens: two blocks, three, and three; two steps each.
    found = sorted((trace.length - PROMPT, trace.num_steps) for trace in traces(folder / "traces.db").values())
    assert found == [(8, 2 * 2), (12, 3 * 2), (12, 3 * 2)]


def test_an_answer_is_filled_up_to_whole_blocks_or_cut(folder):
    texts = ["abcd" + "e" * n for n in (0, 2, 4, 40)]
    (folder / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    limits = {"trajectories__length": "18", "sampler__gen_length": "16"}
    done = prepare(config(folder, trajectories__responses="forced", **limits))
    lm = dlm.load(folder / "model", device="cpu")
    answers = [t.tokens[PROMPT:].tolist() for t in traces(folder / "traces.db").values()]
    found = sorted(answers, key=lambda ids: (len(ids), ids))
    (e,) = lm.encode("e")
    # The first text ends within its prompt; the last answer has no end in fourteen tokens, so its last two go.
    assert found == [[e, e, EOS, EOS], [e] * 4 + [EOS] * 4, [e] * 12] and done.prompts == 4


def test_whole_texts_may_be_prompts(folder):
    prepare(config(folder, trajectories__prompt_length="all", trajectories__length="30"))
    lm = dlm.load(folder / "model", device="cpu")
    prompts = {tuple(trace.tokens[: trace.prompt_length].tolist()) for trace in traces(folder / "traces.db").values()}
    assert prompts == {tuple(lm.encode(text)) for text in TEXTS}


@pytest.mark.parametrize("responses", ["free", "forced"])
def test_holes_are_filled_where_the_answer_stands_among_the_prompt(tmp_path, responses):
    tokenizer = Tokenizer(sudoku_tokenizer(), {"mask_token": "[MASK]", "eos_token": "[EOS]", "pad_token": "[EOS]"})
    special = {"mask_token_id": tokenizer.mask_token_id, "eos_token_id": tokenizer.eos_token_id}
    tiny_lm(tokenizer=tokenizer, vocab_size=tokenizer.vocab_size, **special).save(tmp_path / "model")
    options = {"samples": "3", "length": "81", "responses": responses, "store": str(tmp_path / "traces.db")}
    settings = {f"trajectories.{name}": value for name, value in options.items()}
    settings |= {"model.name": str(tmp_path / "model"), "data.source": "sudoku", "sampler.rule": "entropy_threshold"}
    made = prepare(load(TrajectoriesConfig, [], settings))
    assert made.made == 3
    for trace in traces(tmp_path / "traces.db").values():
        holes = trace.steps >= 0
        assert trace.length == 81 and 30 <= holes.sum() <= 55 and trace.context["kind"] == "infill"
        grid = trace.tokens.reshape(9, 9)
        solved = all(len(set(row.tolist())) == 9 for row in (*grid, *grid.T))
        assert solved == (responses == "forced")


def test_what_is_there_is_not_made_again(folder):
    first = prepare(config(folder, trajectories__samples="5", trajectories__responses="forced"))
    more = prepare(config(folder, trajectories__responses="forced"))
    again = prepare(config(folder, trajectories__responses="forced"))
    assert (first.made, more.made, again.made) == (5, 5, 0) and again.trajectories == 10
    other = prepare(config(folder, trajectories__responses="forced", sampler__entropy_threshold="0.1"))
    assert other.made == 10 and len(traces(folder / "traces.db")) == 20
    assert prepare(config(folder, "one.db", trajectories__responses="forced")).made == 10
    assert contents(folder / "one.db").items() < contents(folder / "traces.db").items()


def test_equal_prompts_are_one_piece_of_work_and_samples_are_several(folder):
    (folder / "texts.jsonl").write_text((json.dumps({"text": TEXTS[0]}) + "\n") * 6)
    options = {"sampler__num_samples": "2", "sampler__temperature": "1.0"}
    done = prepare(config(folder, **options))
    assert (done.prompts, done.trajectories, done.made) == (6, 2, 2)
    a, b = traces(folder / "traces.db").values()
    assert {a.own["sample"], b.own["sample"]} == {0, 1} and a.tokens.tolist() != b.tokens.tolist()


def test_an_interrupt_in_the_middle_of_a_batch_changes_nothing(folder, monkeypatch, capsys):
    from dlm.cli import prepare as command

    (folder / "job.toml").write_text(to_toml(config(folder)))
    step, left = Engine.step, [10**9]

    def interrupted(engine):
        left[0] -= 1
        if left[0] == 0:
            raise KeyboardInterrupt
        return step(engine)

    monkeypatch.setattr(Engine, "step", interrupted)
    prepare(config(folder, "whole.db"))
    left[0] = (10**9 - left[0]) // 2  # half-way through the second of three batches
    assert command.main(["trajectories", "--config", str(folder / "job.toml")]) == 130
    there = len(contents(folder / "traces.db"))
    monkeypatch.setattr(Engine, "step", step)
    assert command.main(["trajectories", "--config", str(folder / "job.toml")]) == 0
    whole = contents(folder / "whole.db")
    assert 0 < there < len(whole) and contents(folder / "traces.db") == whole
    assert f"{len(whole)} trajectories of 10 prompts, {len(whole) - there} of them made now" in capsys.readouterr().out


KILLED = """
import os, sys
from dlm.prepare.config import TrajectoriesConfig
from dlm.prepare.trajectories import prepare
from dlm.trace.store import TraceStore
flush, batches = TraceStore.flush, []
def killed(store):  # after the second of three batches, which the store may have written or not
    if batches:
        os.kill(os.getpid(), 9)
    batches.append(flush(store))
TraceStore.flush = killed
prepare(TrajectoriesConfig.model_validate_json(sys.argv[1]))
"""


def test_killed_and_run_again_it_is_the_run_that_was_never_stopped(folder):
    cfg = config(folder, trajectories__responses="forced")
    command = [sys.executable, "-W", "ignore", "-c", KILLED, cfg.model_dump_json()]
    done = subprocess.run(command, stderr=subprocess.DEVNULL, check=False)
    assert done.returncode == -signal.SIGKILL
    assert 4 <= len(contents(folder / "traces.db")) <= 8
    prepare(cfg)
    prepare(config(folder, "whole.db", trajectories__responses="forced"))
    assert contents(folder / "traces.db") == contents(folder / "whole.db")


def test_parquet_is_written_when_all_is_done_and_trains(folder):
    url = folder / "parquet"
    prepare(config(folder, trajectories__parquet=str(url)))
    train = {"out": str(folder / "run"), "init_from": str(folder / "model"), "steps": 2, "batch_size": 2}
    table = {"train": {**train, "length": 20, "warmup_steps": 0, "device": "cpu"}, "eval": {"sequences": 0}}
    table |= {"data": {"source": "traces", "paths": [str(url)], "heldout_fraction": 0.0}, "log": {"progress": False}}
    table |= {"objective": {"masking": "trajectory", "block_length": 4}, "checkpoint": {"every": 0}}
    result = dlm.train(table)
    assert len(result.losses) == 2 and np.isfinite(result.losses).all()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"data__source": "sudoku", "data__paths": "[]"}, "samples is not set, and data.source"),
        ({"data__source": "chat"}, 'needs data.answers = "last"'),
        ({"trajectories__prompt_length": "20"}, "prompt_length = 20 must be from 0 to length - 1 = 19"),
        ({"trajectories__prompt_length": "all", "data__pack": "fixed"}, 'needs data.pack = "row", not "fixed"'),
        ({"trajectories__prompt_length": "all", "trajectories__responses": "forced"}, "leaves no response"),
        (
            {"sampler__edit_threshold": "0.9", "trajectories__responses": "forced"},
            "edit_threshold = 0.9 changes what trajectories.responses",
        ),
    ],
)
def test_what_cannot_be_is_refused(tmp_path, overrides, message):
    refused(message, config, tmp_path, **overrides)
