"""Bad inputs of every kind, and the one message each gets. `python -m tests.test_bad_inputs` prints them as Markdown."""

import contextlib
import io
import json
import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from dlm.cli import infer, tokenizer, train

COMMANDS = {"dlm-infer": infer.main, "dlm-train": train.main, "dlm-tokenizer": tokenizer.main}
PUZZLE = "530070000600195000098000060800060003400803001700020006060000280000419005000080079"


@dataclass(frozen=True, kw_only=True)
class Case:
    """One mistake: the files it needs, the command line, and what the message must name."""

    room: str
    what: str
    argv: str  # {…} as the shell would quote it
    says: tuple[str, ...]
    files: tuple[tuple[str, str | bytes], ...] = ()
    stdin: str | None = None
    edit: Callable[[Path], None] | None = None  # spoils a good checkpoint, ./model


def case(room: str, what: str, argv: str, *says: str, **more) -> Case:
    files = tuple(more.pop("files", {}).items())
    return Case(room=room, what=what, argv=argv, says=says, files=files, **more)


def config(text: str) -> dict[str, str]:
    return {"my.toml": text}


def edited(**changes: object) -> Callable[[Path], None]:
    """A config.json with some keys changed, or removed by None."""

    def edit(folder: Path) -> None:
        settings = {**json.loads((folder / "config.json").read_text()), **changes}
        (folder / "config.json").write_text(json.dumps({k: v for k, v in settings.items() if v is not None}))

    return edit


def cut(name: str, size: int) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        (folder / name).write_bytes((folder / name).read_bytes()[:size])

    return edit


def without(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


MY = "dlm-infer --config my.toml"
LOAD = "dlm-infer --model.name ./model --prompt x"
TEXT = "dlm-tokenizer --config my.toml"
CASES = [
    case("config", "a misspelt key", MY, 'my.toml: unknown key "sampler.tresh', '"sampler.threshold"', files=config("[sampler]\ntreshold = 0.5")),
    case("config", "a misspelt section", MY, 'unknown key "sampl"; did you mean "sampler"?', files=config("[sampl]\nsteps = 4")),
    case("config", "a key in no section", MY, 'unknown key "steps"; did you mean "sampler.steps"?', files=config("steps = 4")),
    case("config", "a wrong type", MY, 'my.toml: sampler.steps = "many": expected an integer', files=config('[sampler]\nsteps = "many"')),
    case("config", "an unknown choice", "dlm-infer --sampler.rule margins", 'sampler.rule = "margins"', 'did you mean "margin"?'),
    case("config", "out of range", "dlm-infer --sampler.top_p 3", "command line: sampler.top_p = 3: must be less than or equal to 1"),
    case("config", "lengths that do not divide", "dlm-infer --sampler.gen_length 100 --sampler.block_length 32", "gen_length = 100", "block_length = 32", "make it 128"),
    case("config", "a missing file", "dlm-infer --config quikstart", "quikstart: no such config file", 'did you mean "quickstart"?'),
    case("config", "no TOML", MY, "my.toml: not valid TOML", "line 1", files=config("[sampler\n")),
    case("config", "no text", MY, "my.toml: not a text file", files={"my.toml": b"a = '\xff'"}),
    case("config", "an unknown option", "dlm-infer --promt x", 'unknown option --promt; did you mean "--prompt"?'),
    case("config", "an option without its value", "dlm-train --train.lr", "--train.lr needs a value"),
    case("config", "a stray word", "dlm-infer hello", 'unexpected word "hello"'),
    case("config", "two kinds of job in one", MY, "[job.0]", "both `prompt` and `sudoku`", files=config(f'[[job]]\nprompt = "x"\nsudoku = "{PUZZLE}"')),
    case("config", "warm-up beyond the end", "dlm-train --train.steps 10 --train.warmup_steps 50", "train.warmup_steps = 50", "train.steps = 10"),
    case("config", "a model without heads", "dlm-train --model.num_attention_heads 0", "model.num_attention_heads = 0: must be greater than 0"),
    case("config", "a vocabulary smaller than its bytes", "dlm-tokenizer --vocab_size 100", "vocab_size = 100: must be greater than or equal to 260"),
    case("data", "no such file", TEXT, "none.txt", files=config('[data]\nsource = "text"\npaths = ["none.txt"]')),
    case("data", "a source without its paths", TEXT, 'source = "text" needs `paths`', files=config('[data]\nsource = "text"')),
    case("data", "an option of another source", TEXT, "include_tests", "stdlib", files=config('[data]\nsource = "text"\npaths = ["a"]\ninclude_tests = true')),
    case("data", "a line that is not JSON", TEXT, "rows.jsonl:2: not JSON", files={**config('[data]\nsource = "jsonl"\npaths = ["rows.jsonl"]'), "rows.jsonl": '{"text": "a"}\n{"text": \n'}),
    case("data", "a row without the field", TEXT, "rows.jsonl:1", "text", "body", files={**config('[data]\nsource = "jsonl"\npaths = ["rows.jsonl"]'), "rows.jsonl": '{"body": "a"}\n'}),
    case("data", "text that is not UTF-8", TEXT, "a.txt:1: not UTF-8", files={**config('[data]\nsource = "text"\npaths = ["a.txt"]'), "a.txt": b"abc \xff\n"}),
    case("data", "training without a tokenizer", "dlm-train --train.out run --train.steps 50", "train.tokenizer is not set"),
    case("checkpoint", "no such model", "dlm-infer --model.name piko --prompt x", "piko", "bundled models"),
    case("checkpoint", "a file for a folder", "dlm-infer --model.name ./my.toml --prompt x", "is a file; give the checkpoint's folder", files=config("")),
    case("checkpoint", "a folder without config.json", LOAD, "config.json", edit=without("config.json")),
    case("checkpoint", "a config.json that is not JSON", LOAD, "config.json cannot be read as json", edit=cut("config.json", 20)),
    case("checkpoint", "an unknown family", LOAD, "model_type", "bert", "llada", edit=edited(model_type="bert")),
    case("checkpoint", "no weights", LOAD, "has no model.safetensors", edit=without("model.safetensors")),
    case("checkpoint", "cut-off weights", LOAD, "model.safetensors", edit=cut("model.safetensors", 1000)),
    case("checkpoint", "weights of another shape", LOAD, "shape", edit=edited(intermediate_size=24)),
    case("checkpoint", "missing layers", LOAD, "lacks", "tensors", edit=edited(num_hidden_layers=3)),
    case("checkpoint", "a tokenizer that is none", LOAD, "tokenizer.json", edit=cut("tokenizer.json", 30)),
    case("checkpoint", "a device that is not there", LOAD + " --model.device cuda:77", "cuda:77", "use auto, cpu, cuda or mps"),
    case("prompt", "none at all", "dlm-infer", "nothing to do: give --prompt"),
    case("prompt", "empty standard input", "dlm-infer", "standard input is empty", stdin=""),
    case("prompt", "a missing prompt file", "dlm-infer --prompt-file no.txt", "no.txt: cannot be read: No such file"),
    case("prompt", "two sources of prompts", "dlm-infer --prompt x --input y", "--prompt and --input are alternatives"),
    case("prompt", "a request line with a misspelt key", "dlm-infer --input in.jsonl", 'in.jsonl line 2: unknown key "promt"', files={"in.jsonl": '"good"\n{"promt": "x"}\n'}),
    case("prompt", "a request line that is not JSON", "dlm-infer --input in.jsonl", "in.jsonl line 1: not valid JSON", files={"in.jsonl": "{prompt}\n"}),
    case("prompt", "a hole of no length", "dlm-infer --model.name ./model --prompt 'a [MASK:0]'", "[MASK:0]"),
    case("prompt", "a hole of unknown length", "dlm-infer --model.name ./model --prompt 'a [MASK:x]'", "[MASK:x]"),
    case("prompt", "a Sudoku of 80 cells", MY, "job 0: sudoku has 80 cells", files=config(f'[model]\nname = "./model"\n[[job]]\nsudoku = "{PUZZLE[1:]}"')),
    case("prompt", "a Sudoku that breaks its rules", MY, "5 twice", files=config(f'[model]\nname = "./model"\n[[job]]\nsudoku = "55{PUZZLE[2:]}"')),
    # newcomers: one text file, few settings, adapters, folders
    case("config", "adapter settings without a kind", "dlm-train --adapter.r 4", 'r = 4, but adapter.kind = "none" trains all weights: set adapter.kind = "lora" or "qlora"'),
    case("config", "adapter settings of another kind", "dlm-train --adapter.kind lora --adapter.no-double_quant --train.init_from pico", 'adapter.kind = "lora" does not read it: set adapter.kind = "qlora"'),
    case("data", "a tokenizer that is nowhere", "dlm-train --data.source text --data.paths a.txt --train.tokenizer pika", "no tokenizer 'pika'", "bundled models: pico, sudoku", "dlm-tokenizer makes", files={"a.txt": "some words " * 99}),
    case("data", "one text too short for a sequence", "dlm-train --data.source text --data.paths a.txt --train.tokenizer pico --train.out run", "train split of data.source = 'text' holds 1 documents with", "not one sequence of length 256; add data, or lower the length (train.length)", files={"a.txt": "some words"}),
    case("data", "one row, and nothing to hold out", "dlm-train --data.source jsonl --data.paths a.jsonl --train.tokenizer pico --train.length 8 --train.out run", "heldout split", "0 documents", "data.heldout_paths, or hold nothing out: data.heldout_fraction = 0 and eval.sequences = 0", files={"a.jsonl": json.dumps({"text": "some words " * 99})}),
    case("data", "a tokenizer's folder that cannot be written to", "dlm-tokenizer --output a.txt/out", "output = a.txt/out: cannot be written to (Not a directory): choose another folder", files={"a.txt": ""}),
    case("data", "shards in a folder that cannot be written to", "dlm-train --data.source text --data.paths a.txt --prepare a.txt/out", "--prepare a.txt/out: cannot be written to (Not a directory): choose another folder", files={"a.txt": ""}),
    case("checkpoint", "a text for a model without a tokenizer", "dlm-infer --model ./model/. --prompt x", "model './model/.' has no tokenizer: put a tokenizer.json into its folder, or give token ids", edit=without("tokenizer.json")),
    case("checkpoint", "training from a model without a tokenizer", "dlm-train --model ./model --data.source text --data.paths a.txt --train.out run", "train.init_from = './model' has no tokenizer.json, and text needs one", edit=without("tokenizer.json"), files={"a.txt": "some words"}),
]  # fmt: skip


def make_model(folder: Path) -> None:
    """A checkpoint of a few hundred weights, with a byte tokenizer."""
    import torch

    from dlm.data.config import TokenizerConfig
    from dlm.data.tokenizer_training import train_tokenizer
    from dlm.models import LM, ModelConfig, Transformer

    made = train_tokenizer(
        TokenizerConfig(output=str(folder / "t"), vocab_size=300, min_frequency=1), ["some text " * 9]
    )
    shape = ModelConfig(
        vocab_size=made.vocab_size,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=16,
        intermediate_size=32,
        mask_token_id=made.mask_token_id,
        eos_token_id=made.eos_token_id,
    )
    network = Transformer(shape)
    network.initialise(torch.Generator().manual_seed(0))
    LM(network, made, "tiny").save(folder / "model")


def run(entry: Case) -> tuple[int, str]:
    """Exit status and standard error of the case's command, in the current folder."""
    import shlex

    for name, content in entry.files:
        Path(name).write_bytes(content if isinstance(content, bytes) else content.encode())
    if "./model" in entry.argv or "./model" in str(entry.files):
        make_model(Path())
    if entry.edit is not None:
        entry.edit(Path("model"))
    stream = io.StringIO(entry.stdin or "")
    stream.isatty = lambda: entry.stdin is None  # type: ignore[method-assign]
    command, *argv = shlex.split(entry.argv)
    before, sys.stdin = sys.stdin, stream
    try:
        with contextlib.redirect_stderr(io.StringIO()) as err, contextlib.redirect_stdout(io.StringIO()):
            return COMMANDS[command](argv), err.getvalue()
    finally:
        sys.stdin = before


@pytest.mark.parametrize("entry", CASES, ids=lambda entry: f"{entry.room}: {entry.what}")
def test_every_bad_input_gets_its_message(entry, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    status, err = run(entry)
    assert status == 2, err
    assert err.startswith(f"{entry.argv.split()[0]}: ")
    assert "Traceback" not in err
    for words in entry.says:
        assert words in err
    assert err.count("\n") == 1  # one mistake, one line


def test_there_are_enough_of_each_kind():
    rooms = [entry.room for entry in CASES]
    assert len(rooms) >= 20
    assert all(rooms.count(room) >= 5 for room in ("config", "checkpoint", "data", "prompt"))


def markdown() -> str:
    """The table, each message as the user sees it."""
    lines = ["| kind | mistake | command | message |", "|---|---|---|---|"]
    home = Path.cwd()
    for entry in CASES:
        with tempfile.TemporaryDirectory() as folder:
            os.chdir(folder)
            message = run(entry)[1].strip().partition(": ")[2].replace(folder, "…").replace("|", "\\|")
            os.chdir(home)
        lines.append(f"| {entry.room} | {entry.what} | `{entry.argv}` | {message} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(markdown())
