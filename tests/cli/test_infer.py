import json
from types import SimpleNamespace

import pytest

import dlm
from dlm.cli import show
from tests.cli import fake
from tests.cli.fake import ANSWER, PUZZLE


def lines(text: str) -> list[dict]:
    return [json.loads(line) for line in text.splitlines()]


def test_a_prompt_is_answered_with_a_summary(command):
    status, out, err = command("--prompt", "hello")
    assert (status, err) == (0, "")
    assert out.startswith("answer\n6 generated tokens · 3 NFE · 2.00 TPF · ")
    assert out.rstrip().endswith("tokens/s")


def test_quiet_prints_the_text_alone(command):
    assert command("--prompt", "a", "--prompt", "b", "--quiet") == (0, "answer\nanswer\n", "")


def test_holes_are_filled(command):
    assert command("--prompt", "f([MASK:2], [MASK:1])", "--quiet")[1] == "f(xx, x)\n"


def test_standard_input_is_the_prompt(command, tmp_path):
    assert command("--quiet", stdin="a [MASK:3]\n")[1] == "a xxx\n"
    (tmp_path / "p.txt").write_text("b [MASK:3]\n")
    assert command("--quiet", "--prompt-file", str(tmp_path / "p.txt"), stdin="")[1] == "b xxx\n"
    assert command("--quiet", "--prompt-file", "-", stdin="c [MASK:1]")[1] == "c x\n"


def test_json_lines_in_and_out(command, tmp_path):
    rows = ['"one"', '{"prompt": "two [MASK:2]", "request_id": 7}', "", '{"prompt": "three", "sampler": {"seed": 5}}']
    (tmp_path / "in.jsonl").write_text("\n".join(rows))
    status, out, _ = command("--input", str(tmp_path / "in.jsonl"), "--json")
    assert status == 0
    first, second, third = lines(out)
    assert set(first) == {"prompt", "text", "tokens", "nfe", "tpf", "finish_reason", "request_id"}
    assert [line["prompt"] for line in (first, second, third)] == ["one", "two [MASK:2]", "three"]
    assert (first["request_id"], second["request_id"], third["request_id"]) == ("0", "7", "2")
    assert (second["text"], second["holes"]) == ("two xx", ["xx"])
    status, out, err = command("--input", str(tmp_path / "in.jsonl"), "--output", str(tmp_path / "out.jsonl"))
    assert (status, out) == (0, "")
    assert err.endswith("out.jsonl: 3 results\n")
    assert lines((tmp_path / "out.jsonl").read_text()) == [first, second, third]


def test_a_sudoku_is_shown_as_a_grid(command, tmp_path):
    (tmp_path / "s.toml").write_text(f'[output]\nsnapshots = 2\n[[job]]\ntitle = "T"\nsudoku = "{PUZZLE}"\n')
    status, out, _ = command("--config", str(tmp_path / "s.toml"))
    assert status == 0
    assert out.count("┌───────┬───────┬───────┐") == 3  # two snapshots and the answer
    assert "│ · 9 8 │" in out
    assert "│ 1 9 8 │ 3 4 2 │ 5 6 7 │" in out
    assert "solved: " in out
    assert command("--config", str(tmp_path / "s.toml"), "--quiet")[1] == ANSWER + "\n"
    assert lines(command("--config", str(tmp_path / "s.toml"), "--json")[1])[0]["prompt"] == PUZZLE


def test_stop_strings_reach_the_sampler_from_the_command_line_and_from_a_job(command, tmp_path, monkeypatch):
    seen = []

    def noting(lm, prompts, sampler, *more, **named):
        seen.append((prompts, sampler.stop))
        return decode(lm, prompts, sampler, *more, **named)

    decode = fake.continue_all
    monkeypatch.setattr(fake, "continue_all", noting)
    rows = ['{"prompt": "a", "sampler": {"stop": "END"}}', '{"prompt": "b", "sampler": {"stop": ["x", "\\n"]}}', '"c"']
    (tmp_path / "in.jsonl").write_text("\n".join([*rows, '"d [MASK:2]"']))
    assert command("--input", str(tmp_path / "in.jsonl"), "--sampler.stop", '"\\n\\n"', "--quiet")[0] == 0
    assert seen == [(["a"], ("END",)), (["b"], ("x", "\n")), (["c"], ("\n\n",))]
    assert command("--prompt", "a", "--sampler.stop", "def ", "--quiet")[0] == 0
    assert command("--prompt", "a", "--sampler.stop", '["3", "a"]', "--quiet")[0] == 0
    assert [stop for _, stop in seen[3:]] == [("def ",), ("3", "a")]


def test_chat_remembers(command):
    status, out, _ = command("--chat", "--json", stdin="hi\n\nho\n")
    assert status == 0
    assert [(line["request_id"], line["prompt"]) for line in lines(out)] == [("0", "hi"), ("1", "ho")]


def test_a_causal_models_answers_end_by_themselves_unless_a_length_is_given(command, monkeypatch):
    lengths = []

    def noting(lm, prompts, sampler, *more, **named):
        lengths.append(sampler.gen_length)
        return decode(lm, prompts, sampler.model_copy(update={"gen_length": 8}), *more, **named)

    decode = fake.continue_all
    monkeypatch.setattr(fake, "continue_all", noting)
    for attention in ("causal", "bidirectional"):
        known = SimpleNamespace(attention=attention)
        monkeypatch.setitem(vars(dlm), "load", lambda name, config=known, **_: fake.FakeLM(name, config=config))
        show._load.cache_clear()
        assert command("--chat", "--quiet", stdin="hi\n")[0] == 0
        assert command("--chat", "--quiet", "--sampler.gen_length", "16", stdin="hi\n")[0] == 0
    assert lengths == ["auto", 16, 128, 16]


def test_ctrl_c_on_a_terminal_ends_an_answer_and_not_the_conversation(command, monkeypatch):
    asked = []

    def interrupted(lm, prompts, *more, **named):
        asked.append(prompts[0])
        if len(asked) == 2:
            raise KeyboardInterrupt
        return decode(lm, prompts, *more, **named)

    decode = fake.continue_all
    monkeypatch.setattr(fake, "continue_all", interrupted)
    assert command("--chat", "--quiet", stdin="a\nb\nc\n")[0] != 0  # a pipe: the command ends
    assert len(asked) == 2
    asked.clear()
    status, out, err = command("--chat", "--quiet", stdin="a\nb\nc\n", terminal=True)
    assert (status, out) == (0, "answer\nanswer\n")
    assert "Ctrl-C ends an answer, Ctrl-D the conversation." in err
    assert asked[2] == "user: a\nassistant: answer\nuser: c\n"  # what was not answered is forgotten


@pytest.mark.parametrize(
    ("argv", "stdin", "message"),
    [
        (["--prompt", "a", "--output", "no/dir/x"], None, "no/dir/x: cannot be written: No such file or directory"),
        (["--input", "-"], '"a"\n3', "- line 2: expected a string or an object"),
        (
            ["--input", "-"],
            '{"prompt": "a", "sampler": {"steps": "x"}}',
            '- line 1: sampler.steps = "x": expected an integer',
        ),
        (["--prompt", "a", "--model.name", "missing"], None, "no model called missing"),
    ],
)
def test_mistakes_that_bad_inputs_md_does_not_list(command, argv, stdin, message):
    status, out, err = command(*argv, stdin=stdin)
    assert (status, out) == (2, "")
    assert err.startswith("dlm-infer: ")
    assert message in err
