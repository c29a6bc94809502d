"""Rendering conversations and marking their answers, against masks written by hand."""

import json

import numpy as np
import pytest

from dlm.data import chat
from dlm.data.config import DataConfig
from dlm.data.source import build_stream
from tests.refusals import refused

USER = {"role": "user", "content": "2+2?"}
ANSWER = {"role": "assistant", "content": "4"}
AGAIN = {"role": "user", "content": "sure?"}
YES = {"role": "assistant", "content": "yes"}


def test_turns_by_hand(tokenizer):
    turns = chat.split_turns([USER, ANSWER, AGAIN, YES], tokenizer.apply_chat_template)
    assert turns == [
        ("<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n", False),
        ("4<|im_end|>", True),
        ("\n<|im_start|>user\nsure?<|im_end|>\n<|im_start|>assistant\n", False),
        ("yes<|im_end|>", True),
    ]
    last = chat.split_turns([USER, ANSWER, AGAIN, YES], tokenizer.apply_chat_template, "last")
    assert [text for text, answer in last if answer] == ["yes<|im_end|>"]
    assert "".join(t for t, _ in last) == "".join(t for t, _ in turns)


def test_mask_by_hand():
    pieces = [("ab", False), ("c", True), ("de", False), ("fg", True)]
    ids, prompt = chat.encode_turns(pieces, lambda text: [ord(c) for c in text])
    assert bytes(ids.tolist()) == b"abcdefg"
    assert prompt.tolist() == [True, True, False, True, True, False, False]


def test_a_stream_of_conversations(tokenizer, tmp_path):
    file = tmp_path / "chat.jsonl"
    file.write_text(json.dumps({"messages": [USER, ANSWER]}) + "\n")
    config = DataConfig(source="chat", paths=(str(file),), pack="row", heldout_fraction=0)
    sample = next(build_stream(config, tokenizer, 64))
    prompt = tokenizer.encode("<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n")
    answer = tokenizer.encode("4<|im_end|>")
    padding = 64 - len(prompt) - len(answer)
    assert sample["input_ids"].tolist() == prompt + answer + [tokenizer.eos_token_id] * padding
    # Padding is learned: it is how the model knows to stop.
    assert sample["prompt_mask"].tolist() == [True] * len(prompt) + [False] * (len(answer) + padding)


def test_prompt_and_response_columns_are_the_same_conversation(tokenizer, tmp_path):
    for name, row in (("m", {"messages": [USER, ANSWER]}), ("p", {"q": "2+2?", "a": "4"})):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(row) + "\n")
    common = {"source": "chat", "pack": "row", "heldout_fraction": 0}
    one = next(build_stream(DataConfig(paths=(str(tmp_path / "m.jsonl"),), **common), tokenizer, 48))
    pair = DataConfig(paths=(str(tmp_path / "p.jsonl"),), prompt_field="q", response_field="a", **common)
    two = next(build_stream(pair, tokenizer, 48))
    np.testing.assert_array_equal(one["input_ids"], two["input_ids"])
    np.testing.assert_array_equal(one["prompt_mask"], two["prompt_mask"])


def test_rows_without_room_for_an_answer_are_left_out(tokenizer, tmp_path):
    long = {"messages": [{"role": "user", "content": "x " * 200}, ANSWER]}
    (tmp_path / "c.jsonl").write_text("".join(json.dumps(r) + "\n" for r in (long, {"messages": [USER, ANSWER]})))
    config = DataConfig(source="chat", paths=(str(tmp_path / "c.jsonl"),), pack="row", heldout_fraction=0)
    stream = build_stream(config, tokenizer, 64, epochs=1)
    assert [s["prompt_mask"].all() for s in stream] == [False]


def test_templates_of_checkpoints(tokenizer):
    template = (
        "{%- for m in messages %}\n    {%- generation %}{{ m.content | trim }}{% endgeneration %}{{ eos_token }}\n{%- endfor %}"
        "{% if add_generation_prompt %}A:{% endif %}"
    )
    assert chat.render(template, [{"role": "user", "content": " hi "}], True, {"eos_token": "<e>"}) == "hi<e>A:"
    assert (
        chat.render(chat.PLAIN, [USER, ANSWER], True, {"eos_token": "<e>"})
        == "User: 2+2?\nAssistant: 4<e>\nAssistant: "
    )


def test_templates_run_in_a_sandbox():
    refused("chat template", chat.render, "{{ ''.__class__.__mro__[1].__subclasses__() }}", [USER], False)
    refused("no system turns", chat.render, "{{ raise_exception('no system turns') }}", [USER], False)


def test_templates_that_rewrite_earlier_turns_are_refused():
    def rendered(messages: list, add_generation_prompt: bool) -> str:
        return f"[{len(messages)}]" + "".join(m["content"] for m in messages)

    refused(r'data\.answers = "last"', chat.split_turns, [USER, ANSWER], rendered)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"text": "x"}, "no field `messages`"),
        ({"messages": "x"}, "not a list"),
        ({"messages": []}, "not a list"),
        ({"messages": [{"content": "x"}, ANSWER]}, "needs `role` and `content`"),
        ({"messages": [USER]}, "no assistant turn"),
    ],
)
def test_bad_rows_name_file_and_line(tokenizer, tmp_path, row, message):
    file = tmp_path / "chat.jsonl"
    file.write_text(json.dumps({"messages": [USER, ANSWER]}) + "\n\n" + json.dumps(row) + "\n")
    config = DataConfig(source="chat", paths=(str(file),), pack="row", heldout_fraction=0)
    refused(r"chat\.jsonl:3: .*" + message, build_stream, config, tokenizer, 16)
