import json
from pathlib import Path

import numpy as np
import pytest

from dlm.data.config import DataConfig
from dlm.data.loader import BatchLoader
from dlm.data.source import build_stream
from dlm.data.tokenizer import Tokenizer
from dlm.data.traces import committed, document_of
from dlm.errors import UserError
from dlm.trace import MASK, REPLACE, SET, TraceStore, from_events, from_map
from dlm.trace.trace import Trace
from tests.refusals import refused

from .conftest import take

HOLE = 1  # the mask's id


def trace(name: str, prompt: int = 2, answer: int = 4, **context: object) -> Trace:
    """Tokens that tell their place, committed from the last to the first."""
    tokens = np.arange(10, 10 + prompt + answer)
    steps = np.concatenate((np.full(prompt, -1), np.arange(answer)[::-1]))
    return from_map(name, tokens, steps, HOLE, context={"model": "teacher", **context})


def stored(folder: Path, *traces: Trace) -> Path:
    with TraceStore(folder / "traces.db") as store:
        for each in traces:
            store.put(each)
    return folder / "traces.db"


def samples(path: Path, tokenizer: Tokenizer, split: str = "train", **options: object) -> list[dict]:
    config = DataConfig(source="traces", paths=(str(path),), **{"heldout_fraction": 0, **options})
    return take(build_stream(config, tokenizer, 8, split, epochs=1), 100)


def test_a_trace_is_a_padded_row_with_its_order(tmp_path, tokenizer):
    (row,) = samples(stored(tmp_path, trace("a")), tokenizer)
    end = tokenizer.eos_token_id
    assert row["input_ids"].tolist() == [10, 11, 12, 13, 14, 15, end, end]
    assert row["prompt_mask"].tolist() == [True, True] + [False] * 6
    assert row["order"].tolist() == [-1, -1, 3, 2, 1, 0, -1, -1]


def test_a_long_trace_is_cut_and_one_with_no_answer_left_is_no_sample(tmp_path, tokenizer):
    (row,) = samples(stored(tmp_path, trace("a", 3, 9), trace("b", 9, 2)), tokenizer)
    assert row["order"].tolist() == [-1, -1, -1, 8, 7, 6, 5, 4]


def test_edits_and_remasks_count_when_they_settle_a_position():
    events = [(0, 1, SET, 20), (0, 2, SET, 21), (1, 1, MASK, HOLE), (1, 2, REPLACE, 22)]
    events += [(2, 1, SET, 23), (2, 3, SET, 24)]
    made = from_events("a", np.array([10]), np.array(events).T, mask_id=HOLE, num_steps=4, growth=[(-1, 5)])
    assert committed(made).tolist() == [-1, 2, 1, 2, -1]
    document = document_of(made)
    assert document is not None and document.prompt is not None and document.order is not None
    # The last position was never filled: there the answer ends.
    assert document.ids.tolist() == [10, 23, 22, 24]
    assert (document.prompt.tolist(), document.order.tolist()) == ([True, False, False, False], [-1, 2, 1, 2])


def test_what_was_given_behind_a_hole_is_prompt(tmp_path, tokenizer):
    tokens, steps = np.array([10, 11, 12, 13]), np.array([-1, 0, -1, 1])
    (row,) = samples(stored(tmp_path, from_map("a", tokens, steps, HOLE)), tokenizer)
    assert row["prompt_mask"].tolist() == [True, False, True] + [False] * 5
    assert row["order"].tolist() == [-1, 0, -1, 1] + [-1] * 4


def test_a_trace_in_which_nothing_was_written_is_no_sample(tmp_path, tokenizer):
    nothing = from_map("a", np.array([10, HOLE]), np.array([-1, -1]), HOLE)
    assert document_of(nothing) is None
    refused("holds 0 documents", samples, stored(tmp_path, nothing), tokenizer)


def test_store_export_and_json_lines_give_the_same_samples(tmp_path, tokenizer):
    traces = [trace("c"), trace("a", 1, 5), trace("b", 3, 2)]
    path = stored(tmp_path, *traces)
    with TraceStore(path) as store:
        store.export(str(tmp_path / "parquet"))
    with (tmp_path / "trajectories.jsonl").open("w") as file:
        for each in traces:
            n, steps = each.prompt_length, each.steps.tolist()
            row = {"idx": each.request_id, "prompt_ids": each.tokens[:n].tolist(), "nfe": 4}
            if each.request_id == "a":
                row["trajectory"] = each.states()[:, n:].tolist()
            else:
                row |= {"step_map": steps[n:], "token_ids": each.tokens[n:].tolist()}
            file.write(json.dumps(row) + "\n")
    of_store = samples(path, tokenizer)
    # In the order of ids, not of time; epochs are shuffled by seed, so compare as sets of rows too.
    for other in (tmp_path / "parquet", tmp_path / "trajectories.jsonl"):
        for left, right in zip(of_store, samples(other, tokenizer), strict=True):
            assert all(np.array_equal(left[key], right[key]) for key in left)
    again = stored(tmp_path / "again", traces[1], traces[2], traces[0])
    assert all(np.array_equal(a["order"], b["order"]) for a, b in zip(of_store, samples(again, tokenizer), strict=True))


def test_batches_carry_the_order(tmp_path, tokenizer):
    config = DataConfig(source="traces", paths=(str(stored(tmp_path, trace("a"), trace("b"))),), heldout_fraction=0)
    batch = next(BatchLoader(build_stream(config, tokenizer, 8), 2))
    assert batch["order"].tolist() == [[-1, -1, 3, 2, 1, 0, -1, -1]] * 2


def test_answers_to_one_prompt_are_on_one_side_of_the_split(tmp_path, tokenizer):
    traces = []
    for prompt in range(20):
        for sample in range(3):
            made = trace(f"{prompt}/{sample}")
            made.first_token = np.array([30 + prompt, 11, 12 + sample, 13, 14, 15], np.int32)
            traces.append(made)
    path = stored(tmp_path, *traces)
    sides = [samples(path, tokenizer, split, heldout_fraction=0.3) for split in ("train", "heldout")]
    prompts = [[row["input_ids"][0] for row in side] for side in sides]
    assert sorted(prompts[0] + prompts[1]) == sorted(3 * list(range(30, 50)))
    assert not set(prompts[0]) & set(prompts[1]) and all(prompts)


def test_of_few_prompts_the_answers_to_one_are_held_out(tmp_path, tokenizer):
    traces = [trace("0/0"), trace("0/1"), trace("1/0"), trace("2/0")]
    for made in traces:
        made.first_token = np.array([30 + int(made.request_id[0]), 11, 12, 13, 14, 15], np.int32)
    path = stored(tmp_path, *traces)
    sides = [samples(path, tokenizer, split, heldout_fraction=1e-9) for split in ("train", "heldout")]
    train, held = ({int(row["input_ids"][0]) for row in side} for side in sides)
    assert len(held) == 1 and train | held == {30, 31, 32} and not train & held


def test_traces_that_do_not_fit_the_tokenizer_are_refused(tmp_path, tokenizer):
    foreign = stored(tmp_path, trace("a", tokenizer="0123"), trace("b", model="other", tokenizer=tokenizer.fingerprint))
    refused(r"'a' was recorded with another tokenizer \(0123, of model 'teacher'\)", samples, foreign, tokenizer)
    assert len(samples(foreign, tokenizer, trace_model="other")) == 1
    large = trace("a")
    large.first_token = large.first_token + tokenizer.vocab_size
    with pytest.raises(
        UserError, match=f"holds token {15 + tokenizer.vocab_size}, and the tokenizer has {tokenizer.vocab_size} tokens"
    ):
        samples(stored(tmp_path / "large", large), tokenizer)
    with TraceStore(tmp_path / "redacted.db", prompts="omit") as store:
        store.put(trace("a"))
    with pytest.raises(UserError, match='stored without its prompt: record with trace.prompts = "plain"'):
        samples(tmp_path / "redacted.db", tokenizer)


def test_places_without_traces_are_refused(tmp_path, tokenizer):
    refused("no such file", samples, tmp_path / "none.db", tokenizer)
    (tmp_path / "notes.txt").write_text("nothing")
    with pytest.raises(UserError, match=r"notes.txt is no store of traces: expected \*.db, \*.parquet, \*.jsonl"):
        samples(tmp_path / "notes.txt", tokenizer)
    refused('source = "traces" needs `paths`', DataConfig, source="traces", error=ValueError)
    refused('trace_model = .* is only read with source = "traces"', DataConfig, trace_model="pico", error=ValueError)
