"""Text and JSON-lines files: documents, splits, the cache, and errors that name file and line."""

import json
from pathlib import Path

import pytest

from dlm.data import source, table
from dlm.data.config import DataConfig
from dlm.data.source import build_stream, rows_of
from dlm.data.tokenizer import Tokenizer
from dlm.errors import UserError


def texts_of(config: DataConfig, split: str = "train") -> list[str]:
    return [row.value["text"] for row in rows_of(config, split)]


def test_documents_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"one\r\ntwo\n\n \nthree\n")
    for document, expected in (
        ("file", ["one\ntwo\n\n \nthree\n"]),
        ("line", ["one", "two", "three"]),
        ("paragraph", ["one\ntwo", "three"]),
    ):
        config = DataConfig(source="text", paths=(str(tmp_path),), document=document, heldout_fraction=0)
        assert texts_of(config) == expected
    assert [r.where for r in rows_of(config, "train")] == [f"{tmp_path}/a.txt:1", f"{tmp_path}/a.txt:5"]


def test_paths_may_be_files_folders_and_globs(texts: Path) -> None:
    def count(*paths: str) -> int:
        return len(texts_of(DataConfig(source="text", paths=paths, heldout_fraction=0)))

    assert count(str(texts)) == 12
    assert count(str(texts / "0*.txt")) == 10
    assert count(str(texts / "03.txt"), str(texts / "0*.txt"), str(texts)) == 12


def test_splits_by_hash_and_by_named_files(texts: Path, tmp_path: Path) -> None:
    config = DataConfig(source="text", paths=(str(texts),), heldout_fraction=0.3)
    train, held = texts_of(config), texts_of(config, "heldout")
    assert held
    assert len(set(train) | set(held)) == len(train) + len(held) == 12
    (tmp_path / "held.txt").write_text("held")
    named = DataConfig(source="text", paths=(str(texts),), heldout_paths=(str(tmp_path / "held.txt"),))
    assert texts_of(named, "heldout") == ["held"]
    assert len(texts_of(named)) == 12


def test_fields_of_json_lines(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"q": "1", "a": "2"}\n\n{"q": "3", "a": null}\n')
    config = DataConfig(source="jsonl", paths=(str(tmp_path),), text_fields=("q", "a"), heldout_fraction=0)
    assert [source.text_of(r, config) for r in rows_of(config, "train")] == ["1\n2", "3\n"]


def test_tokenised_documents_come_from_the_cache_until_they_change(
    texts: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = DataConfig(source="text", paths=(str(texts),))
    first = build_stream(config, tokenizer, 8).sample(3)["input_ids"]
    monkeypatch.setattr(source, "encode_all", None)
    assert build_stream(config, tokenizer, 8).sample(3)["input_ids"].tolist() == first.tolist()
    with pytest.raises(TypeError):
        build_stream(config.model_copy(update={"cache": False}), tokenizer, 8)
    (texts / "00.txt").write_text("changed")
    with pytest.raises(TypeError):
        build_stream(config, tokenizer, 8)
    assert not [p for p in (table.cache_folder() / "tokens").iterdir() if p.name.startswith(".")]


def test_a_cache_that_cannot_be_written_is_no_error(
    texts: Path, tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("DLM_CACHE", str(tmp_path / "file"))
    assert len(next(build_stream(DataConfig(source="text", paths=(str(texts),)), tokenizer, 8))["input_ids"]) == 8


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text": "a"', r"bad\.jsonl:3: not JSON"),
        (b'["a"]', r"bad\.jsonl:3: .*list, not a JSON object"),
        (b'{"text": "\xff"}', r"bad\.jsonl:3: not UTF-8"),
        (b'{"body": "a"}', r"bad\.jsonl:3: data\.text_fields: no field `text`; the row has body"),
        (b'{"text": 5}', r"bad\.jsonl:3: data\.text_fields: `text` is int"),
    ],
)
def test_bad_lines_are_named(tmp_path: Path, tokenizer: Tokenizer, line: bytes, message: str) -> None:
    (tmp_path / "bad.jsonl").write_bytes(b'{"text": "fine"}\n\n' + line + b"\n")
    config = DataConfig(source="jsonl", paths=(str(tmp_path / "bad.jsonl"),), heldout_fraction=0)
    with pytest.raises(UserError, match=message):
        build_stream(config, tokenizer, 2)


def test_other_mistakes_are_named(tmp_path: Path, tokenizer: Tokenizer) -> None:
    def build(length: int = 8, split: str = "train", **fields: object) -> None:
        build_stream(DataConfig(source="text", **fields), tokenizer, length, split)

    with pytest.raises(UserError, match=r'data\.paths: ".*nothing\.txt": no such file'):
        build(paths=(str(tmp_path / "nothing.txt"),))
    with pytest.raises(UserError, match=r"no \*\.txt .*in this folder"):
        build(paths=(str(tmp_path),))
    (tmp_path / "latin.txt").write_bytes(b"fine\nna\xefve\n")
    with pytest.raises(UserError, match=r"latin\.txt:2: not UTF-8"):
        build(paths=(str(tmp_path / "latin.txt"),))
    (tmp_path / "empty.txt").write_text("\n")
    with pytest.raises(UserError, match="0 documents with 0 tokens"):
        build(paths=(str(tmp_path / "empty.txt"),))
    (tmp_path / "a.txt").write_text("some words")
    with pytest.raises(UserError, match="length 4000"):
        build(4000, paths=(str(tmp_path / "a.txt"),))
    with pytest.raises(UserError, match="known splits are train, heldout"):
        build(split="test", paths=(str(tmp_path / "a.txt"),))
    with pytest.raises(UserError, match="needs a tokenizer"):
        build_stream(DataConfig(), None, 8)
    with pytest.raises(UserError, match="81"):
        build_stream(DataConfig(source="sudoku"), None, 8)
    nameless = Tokenizer(tokenizer.backend, {})
    nameless.__dict__["eos_token_id"] = None
    with pytest.raises(UserError, match="end-of-text"):
        build_stream(DataConfig(source="text", paths=(str(tmp_path / "a.txt"),)), nameless, 8)


def test_a_file_that_mentions_the_mask_holds_no_mask(tmp_path: Path, tokenizer: Tokenizer) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "the [MASK] and <|endoftext|>"}) + "\n")
    config = DataConfig(source="jsonl", paths=(str(tmp_path),), pack="row", heldout_fraction=0)
    ids = next(build_stream(config, tokenizer, 60))["input_ids"].tolist()
    assert tokenizer.mask_token_id not in ids
    assert tokenizer.decode(ids) == "the [MASK] and <|endoftext|>"
    (tmp_path / "a.jsonl").write_text(json.dumps({"p": "what is [MASK]?", "r": "[MASK][MASK] is"}) + "\n")
    pair = {"prompt_field": "p", "response_field": "r", "heldout_fraction": 0}
    ids = next(build_stream(DataConfig(source="chat", paths=(str(tmp_path),), pack="row", **pair), tokenizer, 90))[
        "input_ids"
    ].tolist()
    assert tokenizer.mask_token_id not in ids
    assert "what is [MASK]?<|im_end|>" in tokenizer.decode(ids, skip_special=False)
    assert tokenizer.decode(ids).endswith("\n[MASK][MASK] is")
