"""Responses: what generate writes, once each, whatever was interrupted; and training reads the file."""

import json
from pathlib import Path
from typing import Any

import pytest

import dlm
from dlm.cli.prepare import main
from dlm.config import load
from dlm.data.config import DataConfig
from dlm.data.source import build_stream
from dlm.errors import UserError
from dlm.prepare import responses
from dlm.prepare.config import ResponsesConfig
from dlm.prepare.responses import respond, unfinished_file
from tests.inference.tiny import EOS, text_lm

QUESTIONS = [f"What is {i}?" for i in range(9)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model that ends about half of its answers in time, and nine prompts."""
    lm = text_lm(
        model_type="llama", attention="causal", shifted_logits=True, mask_in_softmax=False, num_key_value_heads=4
    )
    lm.network.lm_head.weight.data[EOS] *= 1.6
    lm.save(tmp_path / "model")
    (tmp_path / "p.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in QUESTIONS))
    return tmp_path


def config(folder: Path, **overrides: str) -> ResponsesConfig:
    small = {
        "model.name": str(folder / "model"),
        "model.device": "cpu",
        "sampler.temperature": "1.0",
        "sampler.gen_length": "24",
        "sampler.block_length": "1",
        "responses.paths": str(folder / "p.jsonl"),
        "responses.out": str(folder / "out.jsonl"),
        "responses.batch_size": "3",
    }
    return load(ResponsesConfig, [], small | {key.replace("__", "."): value for key, value in overrides.items()})


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text("utf-8").splitlines()]


def test_answers_are_what_generate_writes(folder: Path) -> None:
    done = respond(config(folder))
    lm = dlm.load(folder / "model")
    asked = [[{"role": "user", "content": question}] for question in QUESTIONS]
    expected = dlm.generate(lm, asked, temperature=1.0, gen_length=24, block_length=1)
    ended = {i for i, result in enumerate(expected) if result.finish_reason == "stop"}
    assert 2 <= len(ended) <= 7
    found, apart = lines(folder / "out.jsonl"), lines(unfinished_file(folder / "out.jsonl"))
    for rows, numbers in ((found, sorted(ended)), (apart, sorted(set(range(9)) - ended))):
        assert [row["messages"][:-1] for row in rows] == [asked[i] for i in numbers]
        texts = [expected[i].text.strip() for i in numbers]
        assert [row["messages"][-1] for row in rows] == [{"role": "assistant", "content": text} for text in texts]
    assert (done.prompts, done.made, done.answers, done.unfinished) == (9, len(ended), len(ended), 9 - len(ended))
    assert done.tokens == sum(len(result.tokens) for result in expected)


def test_a_killed_run_goes_on_and_nothing_is_made_twice(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    respond(config(folder, responses__out=str(folder / "whole.jsonl")))
    whole = {name: (folder / name).read_bytes() for name in ("whole.jsonl", "whole.unfinished.jsonl")}
    monkeypatch.setattr(responses, "AT_ONCE", 1)
    write, written = responses._write, []

    def killed(*given: Any) -> None:
        if len(written) == 4:
            raise KeyboardInterrupt
        written.append(given)
        write(*given)

    monkeypatch.setattr(responses, "_write", killed)
    with pytest.raises(KeyboardInterrupt):
        respond(config(folder))
    monkeypatch.setattr(responses, "_write", write)
    with (folder / "out.jsonl").open("a") as file:
        file.write('{"messages": [{"role": "us')  # half a line
    done = respond(config(folder))
    assert done.made + done.unfinished == 5
    assert (folder / "out.jsonl").read_bytes() == whole["whole.jsonl"]
    assert unfinished_file(folder / "out.jsonl").read_bytes() == whole["whole.unfinished.jsonl"]
    again = respond(config(folder))
    assert (again.made, again.unfinished, again.tokens) == (0, 0, 0)
    assert again.answers == done.answers


def test_other_settings_and_samples_are_other_answers(folder: Path) -> None:
    first = respond(config(folder, responses__unfinished="keep"))
    assert first.answers == 9
    more = respond(config(folder, responses__unfinished="keep", sampler__num_samples="2"))
    assert (more.answers, more.made) == (
        18,
        9 if "/0" not in lines(folder / "out.jsonl")[0]["id"] else 18,
    ) or more.made == 18
    seeded = respond(config(folder, responses__unfinished="keep", sampler__seed="1"))
    assert seeded.made == 9
    assert len({row["id"] for row in lines(folder / "out.jsonl")}) == len(lines(folder / "out.jsonl"))


def test_training_reads_the_file(folder: Path) -> None:
    respond(config(folder, responses__unfinished="keep"))
    lm = dlm.load(folder / "model")
    data = DataConfig(source="chat", paths=(str(folder / "out.jsonl"),), pack="row", heldout_fraction=0.0, cache=False)
    rows = list(build_stream(data, lm.tokenizer, 96, "train", 0, epochs=1))
    assert len(rows) == 9
    row = lines(folder / "out.jsonl")[0]
    asked = lm.encode(lm.chat(row["messages"][:-1]))
    matching = [r for r in rows if r["input_ids"][: len(asked)].tolist() == asked]
    assert len(matching) == 1
    assert matching[0]["prompt_mask"][: len(asked)].all()
    answer = matching[0]["input_ids"][~matching[0]["prompt_mask"]].tolist()
    assert lm.decode(answer).startswith(row["messages"][-1]["content"])


def test_lines_of_every_kind(folder: Path) -> None:
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    rows = [
        "plain",
        {"question": "asked"},
        {"messages": talk},
        {"messages": [*talk[:1], talk[1]]},
        {"messages": talk[:1]},
    ]
    (folder / "p.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    respond(
        config(folder, responses__prompt_field="question", responses__system="Be brief.", responses__unfinished="keep")
    )
    system = {"role": "system", "content": "Be brief."}
    assert [row["messages"][:-1] for row in lines(folder / "out.jsonl")] == [
        [system, {"role": "user", "content": "plain"}],
        [system, {"role": "user", "content": "asked"}],
        [system, *talk],
        [system, talk[0]],  # the last two ask the same, and are answered once
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": "a"}', r"p\.jsonl:1: no text in `prompt` and no `messages`; the row has text"),
        ("3", r"p\.jsonl:1: '3' is neither a text nor an object"),
        ("{", r"p\.jsonl:1: not JSON"),
        ('{"messages": "a"}', r"`messages` is 'a', not a list"),
        ('{"messages": [{"role": "user"}]}', r"message 0: .* needs `role` and `content`"),
        ('{"messages": [{"role": "assistant", "content": "a"}]}', "nobody asks anything"),
        ("", "no prompt in there"),
    ],
)
def test_mistakes_name_the_line_before_a_model_is_loaded(line: str, message: str, folder: Path) -> None:
    (folder / "p.jsonl").write_text(line)
    with pytest.raises(UserError, match=message):
        respond(config(folder, model__name=str(folder / "nothing")))


def test_other_mistakes(folder: Path) -> None:
    with pytest.raises(UserError, match=r"responses\.paths is not set"):
        respond(config(folder, responses__paths="[]"))
    (folder / "out.jsonl").write_text('{"messages": []}\n')
    with pytest.raises(UserError, match=r"out\.jsonl:1: no line that dlm-prepare responses wrote"):
        respond(config(folder))


def test_the_command(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["responses", "--help"]) == 0
    assert "--responses.unfinished" in capsys.readouterr().out
    assert main(["responses", "--config", "smollm2-responses", "--print-config"]) == 0
    assert "max_gen_length = 384" in capsys.readouterr().out
    options = ["--sampler.gen_length", "8", "--sampler.block_length", "1", "--responses.unfinished", "keep"]
    paths = ["--responses.paths", str(folder / "p.jsonl"), "--responses.out", str(folder / "new" / "o.jsonl")]
    assert main(["responses", "--model", str(folder / "model"), *options, *paths]) == 0
    assert "9 answers to 9 prompts, 9 of them made now" in capsys.readouterr().out
