"""benchmarks/speculative.py at its smallest."""

import json

import pytest
import torch

from ..inference.requests import FAMILIES
from ..inference.tiny import byte_tokenizer, tiny_lm


def test_contenders_write_the_same_text_and_figures_fit_together(script, tmp_path, capsys):
    shape = {**FAMILIES["llama"], "vocab_size": 258, "eos_token_id": 257}
    tiny_lm(2, spread=0.5, tokenizer=byte_tokenizer(), **shape).save(tmp_path / "model")
    threads, file = torch.get_num_threads(), tmp_path / "s.json"
    sizes = ["--count", "2", "--tokens", "8", "--lengths", "2", "--batches", "1", "2"]
    try:
        assert script("speculative").main(["--model", str(tmp_path / "model"), *sizes, "--json", str(file)]) == 0
    finally:
        torch.set_num_threads(threads)
    rows = json.loads(file.read_text())["rows"]
    assert [row["contender"] for row in rows] == ["plain", "ngram 2", "ngram auto"] * 2
    assert all(row["same text"] == "2 of 2" for row in rows)
    assert "tokens/s" in capsys.readouterr().out


def test_a_peer_that_reads_folders_is_not_given_a_name(script, capsys):
    with pytest.raises(SystemExit):
        script("speculative").main(["--model", "pico-causal", "--peers", "transformers"])
    assert "dlm-export pico-causal --to FOLDER" in capsys.readouterr().err


def test_the_cost_of_a_check(script, capsys):
    threads = torch.get_num_threads()
    try:
        assert script("speculative").main(["--cost", "--batches", "1", "--tokens", "16", "--shape", "tiny"]) == 0
    finally:
        torch.set_num_threads(threads)
    assert "τ to break even" in capsys.readouterr().out
