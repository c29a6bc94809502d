import json
import threading

import numpy as np
import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from dlm.data import chat, template
from dlm.data.config import DataConfig
from dlm.data.source import build_stream
from dlm.data.tokenizer import load_tokenizer
from dlm.errors import UserError
from tests.refusals import refused

USER = {"role": "user", "content": "2+2?"}
ANSWER = {"role": "assistant", "content": "4"}
AGAIN = {"role": "user", "content": "sure?"}
YES = {"role": "assistant", "content": "yes"}


def test_turns_by_hand(tokenizer):
    turns = chat.split_turns([USER, ANSWER, AGAIN, YES], tokenizer.apply_chat_template)
    asked = ("<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n", False)
    again = ("\n<|im_start|>user\nsure?<|im_end|>\n<|im_start|>assistant\n", False)
    assert turns == [asked, ("4<|im_end|>", True), again, ("yes<|im_end|>", True)]
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
    plain = chat.render(chat.PLAIN, [USER, ANSWER], True, {"eos_token": "<e>"})
    assert plain == "User: 2+2?\nAssistant: 4<e>\nAssistant: "


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


TALK = [
    {"role": "system", "content": "Be  kind.\n"},
    {"role": "user", "content": " 2+2? "},
    {"role": "assistant", "content": "<think>hm</think>\n\n4", "tools": [{"name": "f", "arguments": {"a": [1, None]}}]},
    {"role": "user", "content": [{"type": "text", "text": "süß"}]},
]
HARMLESS = [
    "{%- for m in messages -%}[{{ loop.index0 }}/{{ loop.length }}{{ '!' if loop.last }}]{{ m.role }}{%- endfor -%}",
    "{% for m in messages if m['role'] != 'system' %}{{ loop.revindex }}{{ m.role | upper | trim }} {% else %}none{% endfor %}",
    "{% for m in messages %}{% if loop.index > 2 %}{% break %}{% endif %}{% if m.role == 'user' %}{% continue %}{% endif %}{{ m.role }}{% endfor %}",
    "{% set ns = namespace(last=-1, found=false) %}{% for m in messages[::-1] %}{% if m.role == 'assistant' and not ns.found %}"
    "{% set ns.found = true %}{% set ns.last = messages | length - 1 - loop.index0 %}{% endif %}{% endfor %}{{ ns.last }}",
    "{% macro show(m, end='.') -%}{{ m.role ~ ': ' ~ m.content }}{{ end }}{{ caller() if caller }}{%- endmacro %}"
    "{{ show(messages[0]) }}{% call show(messages[1], end='?') %}!{% endcall %}",
    "{{ messages[2].content.split('</think>')[-1].lstrip('\\n') }}|{{ messages[2]['content'].startswith('<think>') }}",
    "{{ messages[2].tools | tojson }}{{ messages[2].tools[0] | tojson(indent=2) }}{{ messages[2].tools[0].items() | list }}",
    "{% for key, value in messages[2].tools[0] | dictsort %}{{ key }}={{ value }};{% endfor %}",
    "{% set content %}a{{ 1 + 2 }}b{% endset %}{{ content + content ~ content * 2 }}{{ 7 // 2 }}{{ 7 % 4 }}{{ 2 ** 5 }}{{ 7 / 2 }}",
    "{{ '%s has %d' % ('x', 3) }}{{ '{} and {:>4}'.format('x', 3) }}{{ '%05.1f' | format(3.14159) }}",
    "{{ messages | map(attribute='role') | join(', ') }}{{ messages | selectattr('role', 'equalto', 'user') | list | length }}",
    "{{ messages | rejectattr('content', 'string') | list }}{{ [3, 1, 2] | sort | first }}{{ 'abc' | replace('b', 'xx') }}",
    "{{ ['a', 'b'] | reverse | list }}{{ [1, 2, 3] | sum }}{{ 'x' | default('y') }}{{ none_such | default('y') }}{{ 'aé' | length }}",
    "{% if messages[0].content is string and messages[3].content is iterable and tools is not defined %}yes{% endif %}",
    "{% if 'kind' in messages[0].content and 'role' in messages[0] and 3 not in [1, 2] %}yes{% endif %}{{ 1 < 2 < 3 }}",
    "{% filter upper %}shout {{ messages[0].role }}{% endfilter %}{{ ' a ' | trim | indent(4, true) }}{{ 'a b' | title }}",
    "{% for i in range(3) recursive %}{{ i }}{% endfor %}{{ range(5) | list }}{{ {'a': 1, 'b': [2]}['b'][0] }}{{ (1, 2)[1] }}",
    "{% set a, b = 1, 2 %}{{ a }}{{ b }}{% with c = 3 %}{{ c }}{% endwith %}{{ -a }}{{ not a }}{{ [1, 2, 3, 4][1:3] }}{{ 'abcd'[::2] }}",
    "{{ bos_token }}{{ eos_token ~ 1 }}{{ add_generation_prompt }}{{ cycler('a', 'b').next() }}{{ joiner(',')() }}{{ dict(a=1) }}",
    "{{ 'a\\nb' | indent }}{{ '<b>' | e }}{{ ('<b>' | safe) ~ '&' }}{{ 3.7 | int }}{{ '4' | int + 1 }}{{ 2.5 | round(1) }}",
]


def plainly(text: str) -> str:
    loops = ["jinja2.ext.loopcontrols"]
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=loops)
    environment.filters["tojson"] = template._tojson
    return environment.from_string(text).render(messages=TALK, add_generation_prompt=True, **NAMES)


NAMES = {"bos_token": "<s>", "eos_token": "</s>"}


@pytest.mark.parametrize("text", HARMLESS)
def test_the_account_changes_no_text(text):
    assert chat.render(text, TALK, True, NAMES) == plainly(text)


def test_limits_grow_with_the_conversation():
    text = "{% for m in messages %}{% for c in m.content %}{{ c }}{% endfor %}{% endfor %}"
    long = [{"role": "user", "content": "x" * 200_000}]
    assert chat.render(text, long, False) == "x" * 200_000  # more turns of a loop than a short conversation may have
    copied = (
        "{% set ns = namespace(t='') %}{% for m in messages %}{% set ns.t = ns.t + m.content %}{% endfor %}{{ ns.t }}"
    )
    many = [{"role": "user", "content": "word " * 100}] * 300
    assert len(chat.render(copied, many, False)) == 300 * 500


def test_every_rendering_has_an_account_of_its_own():
    text = "{% for a in range(60000) %}{% endfor %}done"
    assert chat.render(text, TALK, False) == "done"
    found: list[str] = []
    threads = [threading.Thread(target=lambda: found.append(chat.render(text, TALK, False))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == ["done"] * 3


def test_errors_name_the_template_and_where_it_lies(tokenizer, tmp_path):
    tokenizer.save(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("fine\n{% for m in %}")
    with pytest.raises(UserError, match=rf"the chat template in {tmp_path} cannot render .*\(line 2\)"):
        load_tokenizer(tmp_path).apply_chat_template(TALK[:1])
    refused("it calls itself|calls itself", chat.render, "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", TALK, False)


def test_what_is_left_out_says_so():
    refused("No filter named 'pprint'", chat.render, "{{ messages | pprint }}", TALK, False)
    refused(r"templates have no str\.translate", chat.render, "{{ 'a'.translate({97: 'b'}) }}", TALK, False)
