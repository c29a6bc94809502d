import json
from pathlib import Path

import pytest

from dlm.data.config import DataConfig
from dlm.data.corpus import is_held_out
from dlm.data.source import build_stream, rows_of
from dlm.data.split import Split, cut
from dlm.errors import UserError
from tests.data.conftest import take

BOOK = "\n\n".join(f"Chapter {i}.\n" + f"It was the day {i} of {i * 7}. " * 12 for i in range(100))


def sides(config: DataConfig) -> tuple[list[str], list[str]]:
    """The texts of the training and of the held-out split."""
    return tuple([row.value["text"] for row in rows_of(config, split)] for split in ("train", "heldout"))


def book(folder: Path, text: str = BOOK, name: str = "book.txt", **fields: object) -> DataConfig:
    (folder / name).write_text(text)
    return DataConfig(source="text", paths=str(folder), **fields)


def test_paths_may_be_one_string_or_path(tmp_path):
    assert DataConfig(source="text", paths="a.txt") == DataConfig(source="text", paths=("a.txt",))
    assert DataConfig(source="text", paths=tmp_path, heldout_paths="b").paths == (str(tmp_path),)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("fraction", [0.02, 0.2, 0.9])
def test_of_one_text_pieces_are_held_out(tmp_path, fraction):
    config = book(tmp_path, heldout_fraction=fraction)
    train, held = sides(config)
    assert sorted("".join([*train, *held])) == sorted(BOOK)  # all of it, and each place once
    assert all(text in BOOK for text in (*train, *held))
    assert not set("".join(train).split("\n\n")) & set("".join(held).split("\n\n"))
    assert 0.3 * fraction < sum(map(len, held)) / len(BOOK) < 3 * fraction
    assert sides(config) == (train, held) and len(train) <= len(held) + 1  # neighbours in training stay one document
    for row in (*rows_of(config, "train"), *rows_of(config, "heldout")):  # the line each begins at
        line = int(row.where.rpartition(":")[2])
        assert "\n".join(BOOK.split("\n")[line - 1 :]).find(row.value["text"].strip()) >= 0


def test_a_small_text_holds_out_a_tenth(tmp_path):
    train, held = sides(book(tmp_path, BOOK[:1500]))
    assert len(held) == 1 and 100 < len(held[0]) < 300 and sum(map(len, train)) == 1500 - len(held[0])


def test_pieces_end_where_something_ends():
    (pieces,) = cut([BOOK])
    assert "".join(pieces) == BOOK and 15 < len(pieces) < 30
    assert all(piece.endswith("\n\n") for piece in pieces[:-1])
    (lines,) = cut([("word " * 9 + "\n") * 100])
    assert all(piece.endswith("\n") for piece in lines)
    (solid,) = cut(["x" * 5000])
    assert "".join(solid) == "x" * 5000 and {len(piece) for piece in solid[:-1]} == {500}
    assert list(cut(["short", ""])) == [["short"], [""]]


def test_few_files_are_cut_and_many_give_one(tmp_path):
    for i in range(3):
        config = book(tmp_path, f"File {i}. {BOOK}".replace("day", f"day of {i}"), f"{i}.txt")
    train, held = sides(config)
    assert held and len(train) <= 3 + len(held)
    many = tmp_path / "many"
    many.mkdir()
    names = [f"A text of number {i}." for i in range(400)]
    kept = [name for name in names if not is_held_out(name, 0.02)][:60]
    for i, name in enumerate(kept):
        (many / f"{i}.txt").write_text(name)
    train, held = sides(DataConfig(source="text", paths=str(many)))
    assert len(held) == 1 and sorted([*train, *held]) == sorted(kept)


@pytest.mark.parametrize("document", ["line", "paragraph"])
def test_of_lines_and_paragraphs_one_is_held_out(tmp_path, document):
    kept = [line for line in (f"Line {i}." for i in range(99)) if not is_held_out(line, 0.02)][:5]
    config = book(tmp_path, "\n\n".join(kept), document=document)
    train, held = sides(config)
    assert len(held) == 1 and sorted([*train, *held]) == sorted(kept)


def test_a_split_that_works_is_decided_by_each_hash_alone(tmp_path):
    lines = [f"Line {i}." for i in range(300)]
    train, held = sides(book(tmp_path, "\n".join(lines), document="line"))
    assert held == [line for line in lines if is_held_out(line, 0.02)] and len(train) + len(held) == 300
    rows = [{"text": line, "id": i} for i, line in enumerate(lines)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    train, held = sides(DataConfig(source="jsonl", paths=str(tmp_path / "rows.jsonl")))
    assert held == [r["text"] for r in rows if is_held_out(json.dumps(r, sort_keys=True), 0.02)] != []


@pytest.mark.parametrize("fraction", [1e-6, 1 - 1e-6])
def test_of_few_rows_each_side_has_one_and_no_text_is_on_both(tmp_path, fraction):
    rows = [{"text": f"Text {i % 4}.", "id": i} for i in range(12)]  # each text three times
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    train, held = sides(DataConfig(source="jsonl", paths=str(tmp_path), heldout_fraction=fraction))
    assert not set(train) & set(held) and len(train) + len(held) == 12
    assert len(held if fraction < 0.5 else train) == 3


def test_of_few_conversations_one_is_held_out(tmp_path):
    messages = [[{"role": "user", "content": "?"}, {"role": "assistant", "content": f"{i}!"}] for i in range(5)]
    (tmp_path / "chat.jsonl").write_text("\n".join(json.dumps({"messages": m}) for m in messages))
    config = DataConfig(source="chat", paths=str(tmp_path), pack="row", heldout_fraction=1e-6)
    train, held = ([r.value["messages"] for r in rows_of(config, split)] for split in ("train", "heldout"))
    assert len(held) == 1 and held[0] not in train and len(train) == 4


@pytest.mark.parametrize("streaming", [False, True])
def test_of_few_rows_of_a_dataset_one_is_held_out(tmp_path, tokenizer, streaming):
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps({"text": f"Text {i}."}) for i in range(5)))
    where = {"source": "datasets", "dataset": "json", "paths": (str(tmp_path / "rows.jsonl"),)}
    config = DataConfig.model_validate({**where, "heldout_fraction": 1e-6, "pack": "row", "streaming": streaming})
    train, held = sides(config)
    assert len(held) == 1 and sorted([*train, *held]) == [f"Text {i}." for i in range(5)]
    (sample,) = build_stream(config, tokenizer, 16, "heldout")
    assert tokenizer.decode(sample["input_ids"]) == held[0]
    read = {tokenizer.decode(s["input_ids"]) for s in take(build_stream(config, tokenizer, 16), 8)}
    assert read == set(train)


def test_an_endless_stream_is_not_read_to_its_end():
    read = []

    def documents():
        for i in range(10**9):
            read.append(i)
            yield "always the same", "always the same"

    assert Split.of(DataConfig(heldout_fraction=1e-9), documents(), most=100) == Split(1e-9)
    assert len(read) == 100


def test_less_held_out_text_than_a_sequence_is_one_shorter_sequence(tmp_path, tokenizer):
    config = book(tmp_path, BOOK[:1500])
    with pytest.raises(UserError, match=r"heldout split .* not one sequence of length 900; .*eval\.sequences = 0"):
        build_stream(config, tokenizer, 900, "heldout")
    (sample,) = build_stream(config, tokenizer, 900, "heldout", shorten=True)
    assert tokenizer.decode(sample["input_ids"]) == sides(config)[1][0]
    assert len(next(build_stream(config, tokenizer, 16, "heldout", shorten=True))["input_ids"]) == 16


def test_where_nothing_can_be_held_out_all_is_for_training(tmp_path, tokenizer):
    assert sides(book(tmp_path, "one two three", heldout_fraction=0.9)) == (["one two three"], [])
    (tmp_path / "one.jsonl").write_text(json.dumps({"text": BOOK}))
    config = DataConfig(source="jsonl", paths=str(tmp_path / "one.jsonl"))
    assert sides(config) == ([BOOK], [])
    with pytest.raises(UserError, match=r"0 documents .*data\.heldout_paths, or hold nothing out: data\.heldout_f"):
        build_stream(config, tokenizer, 8, "heldout")
    assert sides(book(tmp_path, BOOK, heldout_fraction=0)) == ([BOOK], [])
