import json

import pytest

from dlm.data.lines import LineTask
from dlm.errors import UserError
from dlm.evaluation.questions import load_questions, prompt_of, sources
from tests.refusals import refused, told

ROWS = [
    {"question": "1+1?", "answer": "2", "choices": "", "source": "gsm8k"},
    {"question": "Colour?", "answer": "1", "choices": '["red", "green"]', "source": "mmlu"},
    {"question": "Who?", "answer": "Ada", "choices": "", "source": "longbench_hotpotqa"},
    {"question": "2+2?", "answer": 4, "source": "gsm8k"},
    {"question": "Colour?", "answer": "B", "choices": "['a \"red\"', 'b']", "source": "mmlu"},
    {"question": "Anything", "answer": "", "source": "chat"},
]


def written(tmp_path, *rows):
    file = tmp_path / "d.jsonl"
    file.write_text("\n\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows) + "\n")
    return file


def test_rows(tmp_path):
    found = load_questions(written(tmp_path, *ROWS))
    assert [q.answer for q in found] == ["2", "1", "Ada", "4", "B", ""]
    assert found[1].choices == ("red", "green")
    assert found[4].choices == ('a "red"', "b")
    assert sources(found) == {"gsm8k": 2, "mmlu": 2, "longbench_hotpotqa": 1, "chat": 1}
    assert found[1].where.endswith("d.jsonl:3")  # empty lines count, so editors agree


def test_source_skip_and_limit(tmp_path):
    file = written(tmp_path, *ROWS)
    assert [q.answer for q in load_questions(file, source="gsm8k")] == ["2", "4"]
    assert [q.answer for q in load_questions(file, source="gsm8k", skip=1)] == ["4"]
    assert [q.answer for q in load_questions(file, skip=1, limit=2)] == ["1", "Ada"]
    assert len(load_questions(file, limit=100)) == 6


def test_prompts_ask_for_what_is_graded(tmp_path):
    found = load_questions(written(tmp_path, *ROWS))
    assert prompt_of(found[0]).startswith("1+1?\n\n") and "\\boxed{}" in prompt_of(found[0])
    assert "A. red\nB. green" in prompt_of(found[1])
    assert prompt_of(found[5]) == "Anything"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ('{"question"', "d.jsonl:1: not JSON"),
        ("[1]", "d.jsonl:1: list instead of an object"),
        ("{}", "d.jsonl:1: `question` is missing; the row has no keys"),
        ({"prompt": "x"}, "`question` is missing; the row has prompt"),
        ({"question": 3}, "`question` = '3' is no text"),
        ({"question": "x", "answer": ["y"], "source": "gsm8k"}, "`answer` = "),
        ({"question": "x", "answer": True, "source": "gsm8k"}, "`answer` = 'True' must be text or a number"),
        (
            {"question": "x", "answer": "y", "source": "gsm8"},
            "`source` = 'gsm8' cannot be graded; did you mean \"gsm8k\"?",
        ),
        ({"question": "x", "answer": "y", "source": 8}, "`source` = '8' must be text"),
        ({"question": "x", "answer": "0", "source": "mmlu"}, "`choices` is empty"),
        ({"question": "x", "answer": "0", "choices": "red", "source": "mmlu"}, "`choices` = 'red' is no list of texts"),
        ({"question": "x", "answer": "0", "choices": [[]], "source": "mmlu"}, "`choices` = '[[]]' is no list of texts"),
        (
            {"question": "x", "answer": "7", "choices": ["a", "b"], "source": "mmlu"},
            "`answer` = '7' is none of the 2 choices",
        ),
        ("", "holds no question"),
    ],
)
def test_mistakes_name_line_and_key(tmp_path, row, message):
    told(message, load_questions, written(tmp_path, row))


def test_mistakes_in_what_is_asked_for(tmp_path):
    file = written(tmp_path, *ROWS)
    with pytest.raises(UserError, match='no such source; did you mean "gsm8k"\\? \\(it has gsm8k \\(2\\), mmlu'):
        load_questions(file, source="gsm8")
    refused("skip_sample = 9 leaves nothing: .* has 6 questions", load_questions, file, skip=9)
    refused("no.jsonl: cannot be read as a dataset: No such file", load_questions, tmp_path / "no.jsonl")
    refused("cannot be read as a dataset: Is a directory", load_questions, tmp_path)
    (tmp_path / "b").write_bytes(b"\xff\xfe\x00")
    refused("not a text file", load_questions, tmp_path / "b")
    refused('has the source "stdlib" only', load_questions, "stdlib", source="gsm8k")
    refused('dataset = "mmlu": has no questions of its own: give a JSONL file', load_questions, "mmlu")


def test_the_built_in_set_needs_no_file(monkeypatch):
    tasks = [LineTask(name=f"f.py:{n}", prefix="x" * 5000, line=f"line {n}", suffix="") for n in range(30)]
    monkeypatch.setattr("dlm.data.lines.heldout_lines", lambda data, count, seed: tasks[:count])
    found = load_questions("stdlib", skip=1, limit=2)
    asked = [(q.answer, q.source, q.where) for q in found]
    assert asked == [(f"line {n}", "stdlib", f"f.py:{n}") for n in (1, 2)]
    assert prompt_of(found[0]) == "x" * 1200
    assert len(load_questions("stdlib")) == 20
