"""Slips in training text: what is real stays in order, what is put in carries no loss, and resuming draws the same."""

import numpy as np
import pytest

from dlm.config import check
from dlm.data.config import DataConfig
from dlm.data.preparing import prepare
from dlm.data.slips import COPIES, LONGEST, slipped
from dlm.data.source import build_stream
from dlm.errors import UserError
from tests.inference.tiny import byte_tokenizer

OTHERS = np.arange(9000, 9100)


def runs(mask):
    edges = np.flatnonzero(np.diff(np.concatenate([[0], mask.astype(int), [0]])))
    return list(zip(edges[::2], edges[1::2], strict=True))


def test_the_text_goes_on_after_a_token_out_of_place_and_after_a_loop_of_what_stands_before_it():
    loops, tokens = set(), []
    for seed in range(200):
        ids = np.random.default_rng(seed).permutation(5000)[:256].astype(np.int32)  # all different
        made = slipped({"input_ids": ids, "index": 7}, OTHERS, np.random.default_rng(seed))
        text, put = made["input_ids"], made["prompt_mask"]
        real = text[~put]
        assert len(text) == 256 and made["index"] == 7 and text.dtype == np.int32
        assert real.tolist() == ids[: len(real)].tolist() and 0 < put.mean() < 0.8
        for start, stop in runs(put):
            size = next((n for n in range(1, LONGEST + 1) if text[start] == text[start - n]), None)
            if size is None or not np.array_equal(text[start:stop], text[start - size : stop - size]):
                tokens += text[start:stop].tolist()[: 1 if stop - start == 1 else 0]
            elif stop < 256 and (stop - start) % size == 0:
                loops.add((size, (stop - start) // size))
    assert {size for size, _ in loops} == set(range(1, LONGEST + 1))
    assert {copies for _, copies in loops} >= set(range(1, COPIES + 1))
    assert 0.3 < np.mean(np.array(tokens) >= 9000) < 0.7  # half from the vocabulary, half from the sample


def test_a_prompt_stays_a_prompt():
    ids = np.arange(256, dtype=np.int32)
    made = slipped({"input_ids": ids, "index": 0, "prompt_mask": ids < 40}, OTHERS, np.random.default_rng(0))
    real = made["input_ids"][~made["prompt_mask"]]
    assert real.tolist() == list(range(40, 40 + len(real))) and len(real) > 40


def stream(tmp_path, share, split="train"):
    (tmp_path / "text.txt").write_text("\n\n".join(f"paragraph {i} of some text" for i in range(200)))
    table = {"source": "text", "paths": [str(tmp_path / "text.txt")], "document": "paragraph", "slips": share}
    return build_stream(check(DataConfig, table, "test"), byte_tokenizer(), 64, split, 3)


def test_a_share_of_training_samples_slips_wherever_reading_begins(tmp_path):
    whole = stream(tmp_path, 0.5)
    first = [next(whole) for _ in range(8)]
    state = whole.state_dict()
    second = [next(whole) for _ in range(32)]
    again = stream(tmp_path, 0.5)
    again.load_state_dict(state)
    for one, other in zip(second, [next(again) for _ in range(32)], strict=True):
        assert one.keys() == other.keys() and all(np.array_equal(one[key], other[key]) for key in one)
    assert 8 <= sum("prompt_mask" in one for one in first + second) <= 32
    always, mask = stream(tmp_path, 1.0), byte_tokenizer().mask_token_id
    assert not any((next(always)["input_ids"] == mask).any() for _ in range(1500))
    plain = stream(tmp_path, 0.0)
    assert not any("prompt_mask" in next(plain) for _ in range(40))
    assert not any("prompt_mask" in one for one in stream(tmp_path, 1.0, "heldout"))


def test_only_text_that_training_reads_slips(tmp_path):
    with pytest.raises(UserError, match="slips = 0.5 is only read with source"):
        check(DataConfig, {"source": "sudoku", "slips": 0.5}, "test")
    with pytest.raises(UserError, match=r"slips.*less than or equal to 1"):
        check(DataConfig, {"slips": 2}, "test")
    with pytest.raises(UserError, match="slips = 0.5 is drawn anew as training reads"):
        prepare(DataConfig(slips=0.5), byte_tokenizer(), tmp_path, 8)
