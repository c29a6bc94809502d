import errno
import io
import json
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import tokenizers
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from dlm.data import tokenizer_training
from dlm.data.config import DataConfig, TokenizerConfig
from dlm.data.tokenizer import Tokenizer, has_vocabulary, load_tokenizer
from dlm.data.tokenizer_training import train_tokenizer
from dlm.errors import UserError
from tests.inference.tiny import byte_tokenizer
from tests.refusals import failing, refused

from .conftest import TEXTS


@settings(max_examples=60, deadline=None)
@given(text=st.text(max_size=60))
def test_any_text_survives_the_round_trip(tokenizer, text):
    ids = tokenizer.encode(text, special=False)
    assert tokenizer.decode(ids, skip_special=False) == text
    assert tokenizer.token_bytes[ids].sum() == len(text.encode())


def test_ids_and_names(tokenizer):
    assert (tokenizer.eos_token_id, tokenizer.mask_token_id, tokenizer.pad_token_id) == (0, 1, 0)
    assert tokenizer.vocab_size <= 320
    assert tokenizer.encode("a[MASK]b")[1] == 1
    assert 1 not in tokenizer.encode("a[MASK]b", special=False)
    assert tokenizer.decode([1, 0, 1]) == ""
    assert tokenizer.decode([1, 0], skip_special=False) == "[MASK]<|endoftext|>"


def test_threads_do_not_read_each_others_marks(tokenizer):
    """Half of them read "[MASK]" as the token, half as text, all at once."""
    text, interval = "a[MASK]b", sys.getswitchinterval()
    expected = [tokenizer.encode(text, special=bool(kind)) for kind in range(2)]
    assert expected[0] != expected[1]

    def encode(number: int) -> bool:
        kind = number % 2
        return all(tokenizer.encode(text, special=bool(kind)) == expected[kind] for _ in range(400))

    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(8) as pool:
            assert all(pool.map(encode, range(8)))
    finally:
        sys.setswitchinterval(interval)


def test_a_mask_is_added_behind_the_last_token_and_survives_saving(tokenizer, tmp_path):
    assert tokenizer.with_mask() is tokenizer
    bare = Tokenizer(tokenizers.Tokenizer(tokenizers.models.BPE(vocab={"a": 0, "b": 1}, merges=[])))
    masked = bare.with_mask()
    assert bare.mask_token_id is None and (masked.mask_token_id, masked.vocab_size) == (2, 3)
    masked.save(tmp_path)
    again = load_tokenizer(tmp_path)
    assert again.mask_token_id == 2 and again.encode("a[MASK]b") == [0, 2, 1]
    assert again.fingerprint == masked.fingerprint


def test_pieces_keep_digits_apart_and_indentation_together(tmp_path):
    text = "def f():\n        return 1234 + a.bcd\n"
    trained = train_tokenizer(TokenizerConfig(output=str(tmp_path), vocab_size=400), [text] * 50)
    pieces = [trained.decode([i]) for i in trained.encode(text)]
    assert "".join(pieces) == text
    assert "\n        " in pieces
    assert [p for p in pieces if p.strip().isdigit()] == ["1", "2", "3", "4"]


def test_the_folder_loads_here_and_in_transformers(tokenizer, tmp_path):
    config = TokenizerConfig(output=str(tmp_path), vocab_size=320)
    trained = train_tokenizer(config, TEXTS)
    names = {"tokenizer.json", "vocab.json", "merges.txt", "tokenizer_config.json"}
    assert {p.name for p in tmp_path.iterdir()} == names
    loaded = load_tokenizer(tmp_path)
    text = TEXTS[0] + "[MASK]<|im_end|>"
    assert loaded.encode(text) == trained.encode(text) == tokenizer.encode(text)
    assert loaded.fingerprint == trained.fingerprint
    assert load_tokenizer(tmp_path / "tokenizer.json").mask_token_id == 1
    vocabulary = json.loads((tmp_path / "vocab.json").read_text())
    assert len((tmp_path / "merges.txt").read_text().splitlines()) >= len(vocabulary) - 256 - 4

    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(tmp_path)
    assert theirs(text, add_special_tokens=False)["input_ids"] == loaded.encode(text)
    assert (theirs.mask_token_id, theirs.eos_token_id, theirs.pad_token_id) == (1, 0, 0)
    messages = [{"role": "user", "content": "hi"}]
    ours = loaded.apply_chat_template(messages)
    assert theirs.apply_chat_template(messages, add_generation_prompt=True, tokenize=False) == ours
    assert theirs.decode(loaded.encode(TEXTS[1])) == TEXTS[1]


def test_saving_copies_the_folder(tokenizer, tmp_path):
    tokenizer.encode("switches the backend to plain", special=False)
    tokenizer.save(tmp_path / "copy")
    again = load_tokenizer(tmp_path / "copy")
    assert again.encode("x [MASK] y") == tokenizer.encode("x [MASK] y")
    assert again.chat_template == tokenizer.chat_template
    assert not [p for p in (tmp_path / "copy").iterdir() if p.name.startswith(".")]


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("tokenizer_config.json", {"mask_token": {"content": "<a>", "lstrip": False}, "eos_token": "<b>"}),
        ("special_tokens_map.json", {"mask_token": {"content": "<a>"}, "eos_token": {"content": "<b>"}}),
    ],
)
def test_special_tokens_come_from_whichever_file_names_them(tmp_path, file, content):
    config = TokenizerConfig(output=str(tmp_path), vocab_size=300, special_tokens=("<a>", "<b>"))
    train_tokenizer(config, TEXTS)
    (tmp_path / "tokenizer_config.json").unlink()
    (tmp_path / file).write_text(json.dumps(content))
    loaded = load_tokenizer(tmp_path)
    assert (loaded.mask_token, loaded.eos_token) == ("<a>", "<b>")


def test_without_configs_the_added_tokens_decide(tokenizer, tmp_path):
    tokenizer.save(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    loaded = load_tokenizer(tmp_path)
    assert (loaded.mask_token_id, loaded.eos_token_id) == (1, 0)


def test_transformers_is_asked_when_there_is_no_tokenizer_json(tokenizer, tmp_path):
    train_tokenizer(TokenizerConfig(output=str(tmp_path), vocab_size=320), TEXTS)
    (tmp_path / "tokenizer.json").unlink()
    settings = {"tokenizer_class": "GPT2Tokenizer", "mask_token": "[MASK]"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    loaded = load_tokenizer(tmp_path)
    assert loaded.decode(loaded.encode("def area(r):")) == "def area(r):"
    assert loaded.mask_token_id == 1


def test_bad_folders_say_what_is_wrong(tokenizer, tmp_path):
    refused(r"no tokenizer at .*nowhere", load_tokenizer, tmp_path / "nowhere")
    refused(r"holds no tokenizer\.json", load_tokenizer, tmp_path)
    tokenizer.save(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{")
    refused(r"tokenizer_config\.json is not valid JSON", load_tokenizer, tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    refused(r"not a tokenizer\.json", load_tokenizer, tmp_path)
    (tmp_path / "tokenizer.json").unlink()  # a configuration alone is no tokenizer
    assert not has_vocabulary(tmp_path)
    refused(r"holds no tokenizer\.json: train one with dlm-tokenizer", load_tokenizer, tmp_path)


def test_training_from_a_source_reads_its_training_split(texts, tmp_path):
    data = DataConfig(source="text", paths=(str(texts),))
    trained = train_tokenizer(TokenizerConfig(output=str(tmp_path / "out"), vocab_size=300, data=data))
    assert len(trained.encode("word word")) < 9
    shutil.rmtree(texts)
    refused("no such file", train_tokenizer, TokenizerConfig(output=str(tmp_path / "out"), vocab_size=300, data=data))
    refused("no documents", train_tokenizer, TokenizerConfig(output=str(tmp_path / "none"), vocab_size=300), [])


def test_stored_truncation_is_switched_off(tokenizer, tmp_path):
    tokenizer.save(tmp_path)
    stored = json.loads((tmp_path / "tokenizer.json").read_text())
    stored["truncation"] = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    (tmp_path / "tokenizer.json").write_text(json.dumps(stored))
    assert len(load_tokenizer(tmp_path).encode("a b c d e f")) > 2
    assert np.all(tokenizer.token_bytes[:4] == 0)


def test_bytes_of_other_kinds_of_tokens(tokenizer):
    vocabulary = {"\u2581a": 0, "<0x0A>": 1, "é": 2, "<s>": 3}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    backend.decoder = tokenizers.decoders.Metaspace()
    backend.add_special_tokens(["<s>"])
    backend.add_tokens(["<tool>"])
    assert Tokenizer(backend).token_bytes.tolist() == [2, 1, 2, 0, 6]


EVIL = {"AutoConfig": "evil.Config", "AutoTokenizer": "evil.Tok"}
HOSTILE = (
    "import pathlib\npathlib.Path(__file__).with_name('MARK').write_text('ran')\nclass Tok: ...\nclass Config: ...\n"
)


@pytest.mark.parametrize(
    "files",
    [
        {"tokenizer_config.json": {"auto_map": {"AutoTokenizer": ["evil.Tok", None]}, "tokenizer_class": "Tok"}},
        {"tokenizer_config.json": {"auto_map": {"AutoTokenizer": ["evil.Tok", "evil.Tok"]}}, "vocab.json": {"a": 0}},
        {
            "config.json": {
                "model_type": "evil",
                "auto_map": {"AutoConfig": "evil.Config", "AutoTokenizer": "evil.Tok"},
            },
            "tokenizer_config.json": {},
        },
        {"config.json": {"auto_map": {"AutoTokenizer": ["evil.Tok", None]}}, "vocab.json": {"a": 0}},
    ],
    ids=["tokenizer", "with a vocabulary", "config", "config with a vocabulary"],
)
def test_code_in_a_folder_is_never_run(tmp_path, files, monkeypatch):
    (tmp_path / "evil.py").write_text(HOSTILE)
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n" * 9))
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    refused(r"never run|cannot read the tokenizer|holds no tokenizer\.json", load_tokenizer, tmp_path)
    assert not list(tmp_path.rglob("MARK"))


def test_dreams_tokenizer_is_read_without_its_code(tmp_path):
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=280, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(["def f(x): return x + 1234\n"] * 9, trainer)
    backend.model.save(str(tmp_path))  # vocab.json and merges.txt, as the published folder has them
    size = backend.get_vocab_size()
    names = {str(size): {"content": "<|endoftext|>"}, str(size + 1): {"content": "<|mask|>"}}
    plain = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False, "special": True}
    settings = {"auto_map": {"AutoTokenizer": ["tokenization_dream.DreamTokenizer", None]}}
    settings |= {"tokenizer_class": "DreamTokenizer"}
    settings |= {"added_tokens_decoder": {index: {**token, **plain} for index, token in names.items()}}
    settings |= {"eos_token": "<|endoftext|>", "mask_token": "<|mask|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "tokenization_dream.py").write_text(HOSTILE)
    found = load_tokenizer(tmp_path)
    assert found.decode(found.encode("def f(12) wörld")) == "def f(12) wörld"
    assert found.encode("x<|mask|>")[-1] == size + 1 == found.mask_token_id and found.eos_token_id == size
    assert not list(tmp_path.rglob("MARK"))


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("tokenizer_config.json", "[" * 100_000, "nested too deeply"),
        ("tokenizer_config.json", '{"a":' * 200 + "1" + "}" * 200, "nested more than"),
        ("tokenizer_config.json", "[]", "should hold a json object, not list"),
        ("tokenizer_config.json", '{"mask_token": ["[MASK]"]}', "mask_token = .*should be a token's text"),
        ("tokenizer_config.json", '{"eos_token": {"content": 3}}', "eos_token = .*should be a token's text"),
        ("tokenizer_config.json", '{"chat_template": 3}', "chat_template"),
        ("tokenizer_config.json", '{"chat_template": [3]}', "chat_template"),
        ("special_tokens_map.json", '"x"', "should hold a json object"),
        ("chat_template.jinja", "x" * 300_000, "the limit for a chat template"),
        ("tokenizer.json", '{"model":' * 100_000, r"not a tokenizer\.json"),
        ("tokenizer.json", "", r"not a tokenizer\.json"),
    ],
)
def test_odd_files_beside_a_tokenizer(tokenizer, tmp_path, file, content, message):
    tokenizer.save(tmp_path)
    (tmp_path / file).write_text(content)
    refused(message, lambda: load_tokenizer(tmp_path).apply_chat_template([{"role": "user", "content": "x"}]))


def test_ids_that_no_table_has_room_for():
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 4_000_000_000}, unk_token="a"))
    with pytest.raises(UserError, match=r"token of id 4,000,000,000"):
        Tokenizer(backend).token_bytes  # noqa: B018
    with pytest.raises(UserError, match="no tokens"):
        Tokenizer(tokenizers.Tokenizer(tokenizers.models.BPE())).vocab_size  # noqa: B018


def test_folders_that_cannot_be_written_to_are_refused_before_the_work(tmp_path):
    (tmp_path / "file").write_text("in the way")
    read = []
    for output, reason in ((tmp_path / "file" / "out", "Not a directory"), (tmp_path / "file", "is a file")):
        texts = (read.append(text) or text for text in TEXTS)
        refused(f"output = {output}.*{reason}", train_tokenizer, TokenizerConfig(output=str(output)), texts)
    assert read == []


def test_a_full_disk_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr(tokenizer_training, "write_text", failing(errno.ENOSPC))
    with pytest.raises(UserError, match=r"output = .*: cannot be written to \(No space left on device\)"):
        train_tokenizer(TokenizerConfig(output=str(tmp_path), vocab_size=300), TEXTS)


def test_a_trainer_that_fails_is_said(tmp_path, monkeypatch):
    config = TokenizerConfig(output=str(tmp_path), vocab_size=300)
    for code, message in (
        ("raise SystemExit('out of words')", "out of words"),
        ("import os; os.kill(os.getpid(), 9)", "its process ended with status -9"),
    ):
        monkeypatch.setattr(tokenizer_training, "LEARN", (sys.executable, "-c", code))
        with pytest.raises(UserError, match=f"the tokenizer could not be trained: {message}"):
            train_tokenizer(config, ["x" * 1000] * 1000)  # more than a pipe holds
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("template", "flags", "expected"),
    [
        (None, {}, []),
        ("<|endoftext|> $A", {}, ["<|endoftext|>"]),
        ("<|endoftext|> $A <|endoftext|>", {}, ["<|endoftext|>"]),  # what ends a text does not belong before an answer
        ("$A <|endoftext|>", {}, []),
        ("<|endoftext|> $A", {"add_bos_token": False}, []),
    ],
)
def test_a_text_begins_as_the_tokenizer_says(template, flags, expected):
    backend = tokenizers.Tokenizer.from_str(byte_tokenizer().backend.to_str())
    end = "<|endoftext|>"
    if template is not None:
        ids = [(end, backend.token_to_id(end))]
        backend.post_processor = tokenizers.processors.TemplateProcessing(single=template, special_tokens=ids)
    tokenizer = Tokenizer(backend, flags)
    assert tokenizer.begin == [backend.token_to_id(name) for name in expected]
    whole = tokenizers.Tokenizer.from_str(backend.to_str()).encode("some text").ids
    if flags == {} and not (template or "").endswith(end):
        assert whole == [*tokenizer.begin, *tokenizer.encode("some text")]


def test_a_tokenizer_may_begin_texts_with_end_of_text(tmp_path):
    config = TokenizerConfig(output=str(tmp_path / "t"), vocab_size=300, begin=True)
    train_tokenizer(config, TEXTS)
    tokenizer = load_tokenizer(tmp_path / "t")
    assert tokenizer.begin == [tokenizer.eos_token_id]
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "t")
    assert theirs("some text")["input_ids"] == [*tokenizer.begin, *tokenizer.encode("some text")]
    assert theirs.bos_token == tokenizer.eos_token
    train_tokenizer(config.model_copy(update={"begin": False, "output": str(tmp_path / "u")}), TEXTS)
    assert load_tokenizer(tmp_path / "u").begin == []
