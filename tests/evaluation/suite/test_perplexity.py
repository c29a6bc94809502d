"""Loops, entropy and the judge's nats of continuations, against counts made by hand and numpy's formulas."""

import json
import math
from hashlib import blake2b

import numpy as np
import pytest

import dlm
from dlm.config import check
from dlm.evaluation.suite.config import EvalConfig
from dlm.evaluation.suite.perplexity import entropy, loops
from dlm.evaluation.suite.run import evaluate_all
from tests.inference.tiny import text_lm


def brute(tokens: list[int]) -> bool:
    text = " ".join(f"<{token}>" for token in tokens)
    grams = {" ".join(f"<{token}>" for token in tokens[i : i + 4]) for i in range(len(tokens) - 3)}
    return any(sum(text[at:].startswith(gram) for at in range(len(text))) > 3 for gram in grams)


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([1, 2, 3, 4] * 4, True),
        ([1, 2, 3, 4] * 3 + [1, 2, 3], False),  # three times, and a start
        ([7] * 7, True),  # four overlapping runs
        ([7] * 6, False),
        (list(range(64)), False),
        ([], False),
        ([1, 2, 3], False),
    ],
)
def test_a_loop_is_a_four_gram_more_than_three_times(tokens, expected):
    assert loops(tokens) is expected is brute(tokens)


def test_loops_agree_with_a_search_in_text():
    draw = np.random.default_rng(0)
    cases = [draw.integers(0, 3, 40).tolist() for _ in range(60)]
    assert [loops(c) for c in cases] == [brute(c) for c in cases] and len({loops(c) for c in cases}) == 2


def test_entropy_of_tokens():
    assert entropy([]) == entropy([7, 7, 7]) == 0
    assert entropy([1, 2, 3, 4]) == pytest.approx(math.log(4))
    assert entropy([1, 1, 2]) == pytest.approx(-(2 / 3 * math.log(2 / 3) + 1 / 3 * math.log(1 / 3)))


def test_figures_are_those_of_the_parts(tmp_path, monkeypatch):
    (tmp_path / "texts").mkdir()
    texts = {}  # a text without a name goes by its digest
    for i in range(60):
        lines = [f"line_{n} = call({n * i}, 'and more')\n" for n in range(60)]
        texts[blake2b("".join(lines).encode(), digest_size=6).hexdigest()] = "".join(lines)
        (tmp_path / "texts" / f"{i}.txt").write_text("".join(lines))
    lm = text_lm(max_position_embeddings=512)
    judges = [text_lm(attention="causal", max_position_embeddings=512, seed=seed, spread=0.5) for seed in (4, 5)]
    models = {"tiny": lm, "judge": judges[0]}
    monkeypatch.setattr("dlm.models.loading.load", lambda name, **_: models[name])
    task = {"kind": "perplexity", "data": str(tmp_path / "texts"), "judge": "judge", "gen_length": 12, "limit": 5}
    values = {"eval": {"models": ["tiny"]}, "task": [task], "decoding": [{"temperature": 1.0}]}
    config = check(EvalConfig, {**values, "output": {"file": str(tmp_path / "o.json"), "plot": False}}, "test")
    (run,) = evaluate_all(config).values["runs"]
    shown = []
    for line in (tmp_path / "o.records.jsonl").read_text().splitlines():
        record = json.loads(line)["record"]
        name, _, number = record["item"].rpartition(":")
        text = texts[name]
        at = len("".join(text.splitlines(keepends=True)[: int(number) - 1]))
        prompt = lm.decode(lm.encode(text[:at])[-32:])
        shown.append((record, prompt, text[at : at + 12]))
    seeds = [int.from_bytes(blake2b(f"0 {record['item']}".encode(), digest_size=7).digest()) for record, *_ in shown]
    written = [
        dlm.generate(lm, [prompt], gen_length=12, temperature=1.0, seed=seed)[0]
        for (_, prompt, _), seed in zip(shown, seeds, strict=True)
    ]
    assert [record["text"] for record, *_ in shown] == [one.text for one in written]
    for which, found in (("bits_per_byte", [w.text for w in written]), ("real text", [real for *_, real in shown])):
        costs = dlm.score(judges[0], [(prompt, one) for (_, prompt, _), one in zip(shown, found, strict=True)])
        expected = sum(c.nats for c in costs) / math.log(2) / sum(c.bytes for c in costs)
        assert run["metrics"][which] == pytest.approx(expected)
    assert run["metrics"]["loops"]["total"] == run["metrics"]["its loops"]["total"] == 5
    followed = [lm.encode(real) for *_, real in shown]
    assert run["metrics"]["its entropy"] == pytest.approx(np.mean([entropy(tokens) for tokens in followed]))
    bits = {name: run["metrics"][name] for name in ("real text", "shuffled")}
    assert bits["shuffled"] != bits["real text"]
    sizes = [record["shuffled_bytes"] for record, *_ in shown]
    assert sizes == [record["real_bytes"] for record, *_ in shown]
    nats, size = (np.array([record[name] for record, *_ in shown]) for name in ("nats", "bytes"))
    again = np.random.default_rng(0).integers(0, 5, (20000, 5))  # the error by bootstrap, which divides by n
    spread = (nats[again].sum(1) / np.log(2) / size[again].sum(1)).std() * (5 / 4) ** 0.5
    assert run["metrics"]["bits_error"] == pytest.approx(spread, rel=0.15)
    models["judge"] = judges[1]
    (other,) = evaluate_all(config).values["runs"]  # another judge under the same name is asked anew
    assert other["metrics"]["bits_per_byte"] != run["metrics"]["bits_per_byte"]
