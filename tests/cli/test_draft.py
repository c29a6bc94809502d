"""`dlm-infer --draft.model`, and how the live view shows drafts."""

import json
from types import SimpleNamespace

import numpy as np
import torch

from dlm.cli import infer
from dlm.cli.live import REFUSED, Canvas, draw_text

from ..inference.requests import FAMILIES
from ..inference.tiny import byte_tokenizer, tiny_lm


def test_a_draft_changes_no_text(tmp_path, capsys):
    shape = {**FAMILIES["llama"], "vocab_size": 258, "eos_token_id": 257, "pad_token_id": 257}
    tiny_lm(2, spread=0.5, tokenizer=byte_tokenizer(), **shape).save(tmp_path / "model")
    words = f"--model {tmp_path}/model --prompt abcabcabcab --sampler.gen_length 24 --json".split()
    assert infer.main(words) == 0
    plain = json.loads(capsys.readouterr().out)
    assert infer.main([*words, "--draft.model", "ngram", "--sampler.draft_length", "4"]) == 0
    drafted = json.loads(capsys.readouterr().out)
    assert drafted["tokens"] == plain["tokens"]
    assert "accepted" not in plain
    assert sum(drafted["accepted"]) == len(drafted["tokens"]) - 1
    assert (drafted["target_nfe"], drafted["draft_nfe"]) == (drafted["nfe"], 0)


def test_a_job_may_name_its_own_draft(tmp_path, capsys):
    shape = {**FAMILIES["llama"], "vocab_size": 258, "eos_token_id": 257, "pad_token_id": 257}
    tiny_lm(2, spread=0.5, tokenizer=byte_tokenizer(), **shape).save(tmp_path / "model")
    config = tmp_path / "two.toml"
    jobs = f"""
        model.name = "{tmp_path}/model"
        sampler.gen_length = 12
        [[job]]
        prompt = "abcabcabcab"
        [[job]]
        prompt = "abcabcabcab"
        draft.model = "ngram"
        sampler.draft_length = 4
    """
    config.write_text(jobs)
    assert infer.main(["--config", str(config), "--json"]) == 0
    plain, drafted = map(json.loads, capsys.readouterr().out.splitlines())
    assert drafted["tokens"] == plain["tokens"]
    assert "accepted" in drafted
    assert "accepted" not in plain
    config.write_text(jobs.replace('draft.model = "ngram"', ""))
    assert infer.main(["--config", str(config)]) == 2
    assert "[job.1.sampler] draft_length is only read with a draft" in capsys.readouterr().err
    config.write_text(jobs.replace('"abcabcabcab"\n        draft', '"ab[MASK:2]"\n        draft'))
    assert infer.main(["--config", str(config)]) == 2
    assert "job 1: [draft] model = 'ngram' continues texts" in capsys.readouterr().err


def test_refused_drafts_are_struck_through_until_the_next_step():
    canvas = Canvas(mask_id=9)
    row = {"request_ids": ["a"], "lengths": (4,), "nfe": 1}
    none = torch.zeros(1, 4, dtype=torch.bool)
    shown = {
        "canvas": torch.tensor([[1, 2, 3, 9]]),
        "committed": torch.tensor([[False, True, True, False]]),
        "edited": none,
        "drafted": torch.tensor([[False, True, False, False]]),
        "refused": torch.tensor([[-1, -1, 5, 6]]),
    }
    canvas.update(SimpleNamespace(**row, step=0, **shown))
    text = draw_text(lambda ids: "".join("abcdefghij"[i] for i in ids), room=5)(canvas)
    assert text.plain == "bcfdg"  # token 2 kept, 5 refused for 3, 6 refused
    struck = {text.plain[span.start : span.end] for span in text.spans if str(span.style) == REFUSED}
    assert struck == {"f", "g"}
    assert canvas.style(1).startswith("underline")
    canvas.update(SimpleNamespace(**row, step=1, **{**shown, "drafted": None, "refused": None}))
    assert np.array_equal(canvas.tokens, [1, 2, 3, 9])
