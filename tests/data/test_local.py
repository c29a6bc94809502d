import json
from pathlib import Path

import pytest

from dlm.data import corpus, source, table
from dlm.data.config import DataConfig
from dlm.data.source import build_stream, rows_of
from dlm.data.tokenizer import Tokenizer
from tests.refusals import refused

from .conftest import PAIRS


def texts_of(config: DataConfig, split: str = "train") -> list[str]:
    return [row.value["text"] for row in rows_of(config, split)]


def test_documents_of_a_file(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"one\r\ntwo\n\n \nthree\n")
    for document, expected in (
        ("file", ["one\ntwo\n\n \nthree\n"]),
        ("line", ["one", "two", "three"]),
        ("paragraph", ["one\ntwo", "three"]),
    ):
        config = DataConfig(source="text", paths=(str(tmp_path),), document=document, heldout_fraction=0)
        assert texts_of(config) == expected
    assert [r.where for r in rows_of(config, "train")] == [f"{tmp_path}/a.txt:1", f"{tmp_path}/a.txt:5"]


def test_paths_may_be_files_folders_and_globs(texts):
    def count(*paths: str) -> int:
        return len(texts_of(DataConfig(source="text", paths=paths, heldout_fraction=0)))

    assert count(str(texts)) == 12
    assert count(str(texts / "0*.txt")) == 10
    assert count(str(texts / "03.txt"), str(texts / "0*.txt"), str(texts)) == 12


def test_splits_by_hash_and_by_named_files(texts, tmp_path):
    config = DataConfig(source="text", paths=(str(texts),), heldout_fraction=0.3)
    train, held = texts_of(config), texts_of(config, "heldout")
    assert held
    assert len(set(train) | set(held)) == len(train) + len(held) == 12
    (tmp_path / "held.txt").write_text("held")
    named = DataConfig(source="text", paths=(str(texts),), heldout_paths=(str(tmp_path / "held.txt"),))
    assert texts_of(named, "heldout") == ["held"]
    assert len(texts_of(named)) == 12


def test_fields_of_json_lines(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"q": "1", "a": "2"}\n\n{"q": "3", "a": null}\n')
    config = DataConfig(source="jsonl", paths=(str(tmp_path),), text_fields=("q", "a"), heldout_fraction=0)
    assert [source.text_of(r, config) for r in rows_of(config, "train")] == ["1\n2", "3\n"]


def test_tokenised_documents_come_from_the_cache_until_they_change(texts, tokenizer, monkeypatch):
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


def test_a_cache_that_cannot_be_written_is_no_error(texts, tokenizer, tmp_path, monkeypatch):
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
def test_bad_lines_are_named(tmp_path, tokenizer, line, message):
    (tmp_path / "bad.jsonl").write_bytes(b'{"text": "fine"}\n\n' + line + b"\n")
    config = DataConfig(source="jsonl", paths=(str(tmp_path / "bad.jsonl"),), heldout_fraction=0)
    refused(message, build_stream, config, tokenizer, 2)


def test_other_mistakes_are_named(tmp_path, tokenizer):
    def build(length: int = 8, split: str = "train", **fields: object) -> None:
        build_stream(DataConfig(source="text", **fields), tokenizer, length, split)

    refused(r'data\.paths: ".*nothing\.txt": no such file', build, paths=(str(tmp_path / "nothing.txt"),))
    refused(r"no \*\.txt .*in this folder", build, paths=(str(tmp_path),))
    (tmp_path / "latin.txt").write_bytes(b"fine\nna\xefve\n")
    refused(r"latin\.txt:2: not UTF-8", build, paths=(str(tmp_path / "latin.txt"),))
    (tmp_path / "empty.txt").write_text("\n")
    refused("0 documents with 0 tokens", build, paths=(str(tmp_path / "empty.txt"),))
    (tmp_path / "a.txt").write_text("some words")
    refused("length 4000", build, 4000, paths=(str(tmp_path / "a.txt"),))
    refused("known splits are train, heldout", build, split="test", paths=(str(tmp_path / "a.txt"),))
    refused("needs a tokenizer", build_stream, DataConfig(), None, 8)
    refused("81", build_stream, DataConfig(source="sudoku"), None, 8)
    nameless = Tokenizer(tokenizer.backend, {})
    nameless.__dict__["eos_token_id"] = None
    refused("end-of-text", build_stream, DataConfig(source="text", paths=(str(tmp_path / "a.txt"),)), nameless, 8)


def test_a_file_that_mentions_the_mask_holds_no_mask(tmp_path, tokenizer):
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "the [MASK] and <|endoftext|>"}) + "\n")
    config = DataConfig(source="jsonl", paths=(str(tmp_path),), pack="row", heldout_fraction=0)
    ids = next(build_stream(config, tokenizer, 60))["input_ids"].tolist()
    assert tokenizer.mask_token_id not in ids
    assert tokenizer.decode(ids) == "the [MASK] and <|endoftext|>"
    (tmp_path / "a.jsonl").write_text(json.dumps({"p": "what is [MASK]?", "r": "[MASK][MASK] is"}) + "\n")
    ids = next(build_stream(DataConfig(paths=(str(tmp_path),), **PAIRS), tokenizer, 90))["input_ids"].tolist()
    assert tokenizer.mask_token_id not in ids
    assert "what is [MASK]?<|im_end|>" in tokenizer.decode(ids, skip_special=False)
    assert tokenizer.decode(ids).endswith("\n[MASK][MASK] is")


HASH_OF_LOGGING = 0.01942845751046896
BODY = "\n".join(f"def some_function_number_{i}(argument, other): return argument + {i}" for i in range(30)) + "\n"


def write(root: Path, files: dict[str, str | bytes]) -> Path:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    return root


@pytest.fixture
def library(tmp_path: Path) -> Path:
    named = {f"module_{i}.py": f"# {i}\n" + BODY.replace("some", f"m{i}") for i in range(60)}
    skipped: dict[str, str | bytes] = {"site-packages/x.py": "x = 1", "pydoc_data/topics.py": "x = 2"}
    skipped |= {"encodings/cp1.py": "def getregentry(): ...", "_sysconfigdata_here.py": "build_time_vars = {}"}
    skipped |= {"latin.py": b"x = '\xe9'", "empty.py": "\n", "email/test/test_email.py": "x = 3"}
    return write(tmp_path / "lib", named | skipped | {"email/parser.py": "x = 4"})


def test_reads_sources_in_order_without_tables_and_tests(library):
    paths = [f.path for f in corpus.stdlib_files(DataConfig(), library)]
    assert paths == sorted([f"module_{i}.py" for i in range(60)] + ["email/parser.py"])
    with_tests = [f.path for f in corpus.stdlib_files(DataConfig(include_tests=True), library)]
    assert set(with_tests) - set(paths) == {"email/test/test_email.py"}


def test_the_hash_never_changes():
    # Bundled models were trained on this split: a different hash would put their held-out files into training.
    assert corpus.hash_fraction("logging/__init__.py", corpus.SALT) == pytest.approx(HASH_OF_LOGGING, abs=1e-12)
    assert corpus.is_held_out("logging/__init__.py", 0.02)
    assert not corpus.is_held_out("json/decoder.py", 0.02)


def test_splits_are_disjoint_whole_and_grow_with_the_fraction(library):
    small, large = DataConfig(heldout_fraction=0.1), DataConfig(heldout_fraction=0.3)
    paths = {s: {f.path for f in corpus.split_files(small, s, library)} for s in ("train", "heldout")}
    assert not paths["train"] & paths["heldout"]
    assert paths["train"] | paths["heldout"] == {f.path for f in corpus.stdlib_files(small, library)}
    assert 0 < len(paths["heldout"]) < 20
    assert paths["heldout"] <= {f.path for f in corpus.split_files(large, "heldout", library)}


def test_site_packages_never_hold_a_held_out_file(library, tmp_path):
    config = DataConfig(heldout_fraction=0.3, site_packages=True, site_packages_max_bytes=9000)
    held = corpus.split_files(config, "heldout", library)[-1]
    assert held.path.startswith("module_")
    site = write(
        tmp_path / "site",
        {
            "vendor/copy.py": held.text,
            "vendor/crlf.py": held.text.replace("\n", "\r\n"),
            "vendor/indented.py": "if True:\n" + "".join(f"    {line}\n" for line in held.text.splitlines()),
            "vendor/edited.py": held.text.replace("number_1", "no_1"),
            "vendor/embedded.py": BODY + held.text,
            "own/new.py": "a = 'nothing in common with the library'\n",
            "own/twin.py": "a = 'nothing in common with the library'\n",
            "own/large.py": "b = 1\n" * 5000,
            "other/mine.py": "c = 1\n",
        },
    )
    found = {f.path for f in corpus.split_files(config, "train", library, site) if f.path.startswith("site-packages/")}
    assert found == {"site-packages/own/new.py", "site-packages/other/mine.py"}
    only = config.model_copy(update={"site_packages_only": ("other",)})
    assert [f.path for f in corpus.split_files(only, "train", library, site)][-1] == "site-packages/other/mine.py"
    without = config.model_copy(update={"site_packages_skip": ("own", "other", "vendor")})
    assert not any("site-packages" in f.path for f in corpus.split_files(without, "train", library, site))
    assert not any("site-packages" in f.path for f in corpus.split_files(config, "heldout", library, site))


def test_repeat_counts_training_files_only(library):
    once, twice = DataConfig(), DataConfig(stdlib_repeat=2)
    assert corpus.split_files(twice, "train", library) == corpus.split_files(once, "train", library) * 2
    assert corpus.split_files(twice, "heldout", library) == corpus.split_files(once, "heldout", library)


def test_a_python_without_sources_says_so(tmp_path):
    refused("source = text", corpus.stdlib_files, DataConfig(), tmp_path)
    refused("missing", corpus.stdlib_files, DataConfig(), tmp_path / "nowhere")
