"""Bad inputs of every kind, and the one message each gets. `python -m tests.test_bad_inputs` prints them as Markdown."""

import contextlib
import io
import json
import os
import shlex
import sqlite3
import struct
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from dlm.cli import bench, export, infer, serve, show, tokenizer, trace, train
from dlm.cli import eval as eval_command
from dlm.trace.connection import APPLICATION, TABLES
from tests.hostile.checkpoints import CHECKPOINTS, indexed, raw
from tests.hostile.checkpoints import config as changed

COMMANDS = {"dlm-infer": infer.main, "dlm-train": train.main, "dlm-tokenizer": tokenizer.main}
COMMANDS |= {"dlm-export": export.main, "dlm-trace": trace.main, "dlm-serve": serve.main}
COMMANDS |= {"dlm-eval": eval_command.main, "dlm-bench": bench.main}
PUZZLE = "530070000600195000098000060800060003400803001700020006060000280000419005000080079"


@dataclass(frozen=True, kw_only=True)
class Case:
    """One mistake: the files it needs, the command line, and what the message must name."""

    room: str
    what: str
    argv: str  # {…} as the shell would quote it
    says: tuple[str, ...]
    files: dict[str, str | bytes] = field(default_factory=dict)
    stdin: str | None = None
    edit: Callable[[Path], None] | None = None  # spoils a good checkpoint, ./model


MAMBA = b"GGUF" + struct.pack("<IQQQ20sIQ5s", 3, 0, 1, 20, b"general.architecture", 8, 5, b"mamba")
"""The header of a GGUF file, and all of it."""


def case(room: str, what: str, argv: str, *says: str, **more) -> Case:
    return Case(room=room, what=what, argv=argv, says=says, **more)


def config(text: str) -> dict[str, str]:
    return {"my.toml": text}


def cut(name: str, size: int) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        (folder / name).write_bytes((folder / name).read_bytes()[:size])

    return edit


def without(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def database(*statements: str) -> bytes:
    """An SQLite file."""
    sql = sqlite3.connect(":memory:")
    for statement in statements:
        sql.execute(statement)
    content = sql.serialize()
    sql.close()
    return content


STORE = database(*TABLES, f"PRAGMA application_id = {APPLICATION}", "PRAGMA user_version = 1")


ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
MY = "dlm-infer --config my.toml"
GGUF = "dlm-infer --model ./m.gguf --prompt x"
LOAD = "dlm-infer --model.name ./model --prompt x"
TEXT = "dlm-tokenizer --config my.toml"
TINY = "dlm-train --config my.toml"
SMALL = """
train = { steps = 4, batch_size = 2, length = 81, warmup_steps = 0, device = "cpu" }
model = { hidden_size = 16, num_hidden_layers = 1, num_attention_heads = 2, num_key_value_heads = 2, head_dim = 8, intermediate_size = 24 }
data = { source = "sudoku", sudoku_pool = 20 }
eval = { sequences = 0 }
checkpoint = { every = 0 }
log = { progress = false }
"""  # fmt: skip
LATENT = SMALL.replace("model = {", "#") + "trainable = { kind = 'latent', own = { %s } }"
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
    case("checkpoint", "a GGUF file that is none", GGUF, "m.gguf is no GGUF file", files={"m.gguf": "hello"}),
    case("checkpoint", "a GGUF file that is cut off", GGUF, "m.gguf is cut off", files={"m.gguf": MAMBA[:60]}),
    case("checkpoint", "a GGUF file of another architecture", GGUF, "general.architecture = 'mamba' is not supported; known: llama", files={"m.gguf": MAMBA}),
    case("checkpoint", "a misspelt GGUF file", "dlm-infer --model ./n.gguf --prompt x", "no such file; did you mean m.gguf?", files={"m.gguf": MAMBA}),
    case("checkpoint", "a folder without config.json", LOAD, "config.json", edit=without("config.json")),
    case("checkpoint", "a config.json that is not JSON", LOAD, "config.json cannot be read as json", edit=cut("config.json", 20)),
    case("checkpoint", "an unknown family", LOAD, "model_type", "bert", "llada", edit=changed(model_type="bert")),
    case("checkpoint", "no weights", LOAD, "has no model.safetensors", edit=without("model.safetensors")),
    case("checkpoint", "cut-off weights", LOAD, "model.safetensors is not a whole safetensors file", edit=cut("model.safetensors", 1000)),
    case("checkpoint", "weights of another shape", LOAD, "shape", edit=changed(intermediate_size=24)),
    case("checkpoint", "missing layers", LOAD, "lacks", "tensors", edit=changed(num_hidden_layers=3)),
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
    case("prompt", "a range that falls", "dlm-infer --model.name ./model --prompt 'a [MASK:16-4]'", "[MASK:16-4]", "as in [MASK:4-16]"),
    case("prompt", "a range from nothing", "dlm-infer --model.name ./model --prompt 'a [MASK:0-3]'", "[MASK:0-3]", "from 1 to"),
    case("prompt", "a range beyond all bounds", "dlm-infer --model.name ./model --prompt 'a [MASK:1-100000]'", "[MASK:1-100000]", "from 1 to 65536"),
    case("prompt", "a range without its end", "dlm-infer --model.name ./model --prompt 'a [MASK:4-]'", "[MASK:4-]"),
    case("prompt", "an empty stop string", """dlm-infer --model.name ./model --prompt a --sampler.stop '""'""", 'sampler.stop = ""', "an empty string"),
    case("prompt", "a stop string of a job that is a number", "dlm-infer --input in.jsonl", "in.jsonl line 1: sampler.stop", "expected a string or a list", files={"in.jsonl": '{"prompt": "x", "sampler": {"stop": [3]}}\n'}),
    case("export", "no target", "dlm-export ./model", "which model, and where to? dlm-export FOLDER --to OUT"),
    case("export", "an unknown family", "dlm-export ./model --to out --family gpt", "--family: invalid choice: 'gpt'", "llada"),
    case("export", "a family that cannot express the network", "dlm-export ./model --to out --family llama", "family = 'llama' cannot say shifted_logits = False", "leave family out"),
    case("export", "a mixture's family for a dense network", "dlm-export ./model --to out --family llada_moe", "'llada_moe' is a mixture of experts, and this network is dense"),
    case("export", "a block family for a network without blocks", "dlm-export ./model --to out --family sdar", "this model has no block_length", "convert(lm, 'block_causal', block_length=32)"),
    case("export", "into the folder that is read", "dlm-export ./model --to model", "--to model is the folder that is read: give another"),
    case("export", "into a folder of other files", "dlm-export ./model --to out", "out holds 'thesis.tex' and is no checkpoint", "--overwrite", files={"out/thesis.tex": ""}),
    case("export", "into a file", "dlm-export ./model --to out", "out is a file: give a folder", files={"out": ""}),
    case("export", "below a file", "dlm-export ./model --to out/model", "out/model cannot be written (", "give a folder that you may write to", files={"out": ""}),
    case("export", "to a device", "dlm-export ./model --to /dev/full", "/dev/full is a file: give a folder"),
    case("export", "a folder without a model", "dlm-export . --to out", "has no config.json, so it is not a checkpoint"),
    case("export", "shards of no size", "dlm-export ./model --to out --max-shard-size 0", "--max-shard-size 0: a number of gigabytes above 0"),
    case("prompt", "a prompt beyond the context", f"{LOAD} --prompt-file long.txt --sampler.gen_length 8".replace(" --prompt x", ""), "long.txt: has 3001 tokens", "gen_length = 8", "3009 positions", "made for 2048 positions", "--allow-long", files={"long.txt": "abc" * 1000 + "d"}),
    case("prompt", "a generation beyond the context", f"{LOAD} --sampler.gen_length 4096", "--prompt: has 1 tokens; with gen_length = 4096 that is 4097 positions", "made for 2048"),
    case("prompt", "a hole beyond the context", "dlm-infer --model.name ./model --prompt 'a [MASK:9999]'", "--prompt: has", "made for 2048 positions"),
    case("config", "a billion tokens", f"{LOAD} --sampler.gen_length 1000000000", "gen_length = 1000000000", "1048576 tokens at most"),
    case("config", "a billion steps", f"{LOAD} --sampler.steps 1000000000", "sampler.steps = 1000000000: must be less than or equal to 1048576"),
    case("config", "a billion samples", f"{LOAD} --sampler.num_samples 1000000000", "sampler.num_samples = 1000000000: must be less than or equal to 65536"),
    case("config", "an endless temperature", f"{LOAD} --sampler.temperature inf", "sampler.temperature", "finite number"),
    case("prompt", "half a character", "dlm-infer --input in.jsonl", "in.jsonl line 2: is no Unicode text: character 1 is \\ud800", files={"in.jsonl": '"good"\n"x\\ud800"\n'}),
    case("prompt", "half a character in an id", "dlm-infer --input in.jsonl", "in.jsonl line 1: request_id", "half of a surrogate pair", files={"in.jsonl": '{"prompt": "x", "request_id": "\\udfff"}\n'}),
    case("prompt", "a prompt file that is no text", "dlm-infer --prompt-file a.txt", "a.txt: is no UTF-8 text: invalid start byte at byte 2 (0xff)", files={"a.txt": b"ab\xff"}),
    case("prompt", "a request line nested without end", "dlm-infer --input in.jsonl", "in.jsonl line 1: cannot be read as JSON", files={"in.jsonl": "[" * 100_000}),
    case("prompt", "a request id that two lines have", "dlm-infer --input in.jsonl", "in.jsonl line 2: request_id '7' is that of in.jsonl line 1", files={"in.jsonl": '{"prompt": "x", "request_id": 7}\n{"prompt": "y", "request_id": "7"}\n'}),
    case("output", "a folder that is a file", "dlm-infer --prompt x --output my.toml/out.jsonl", "my.toml/out.jsonl: cannot be written: Not a directory", files=config("")),
    case("output", "a store in a file", "dlm-infer --prompt x --trace --trace.store my.toml/t.db", "my.toml/t.db: its folder cannot be made", files=config("")),
    # newcomers: one text file, few settings, adapters, folders
    case("config", "adapter settings without a kind", "dlm-train --adapter.r 4", 'r = 4 is only read with kind = "lora" or "qlora", and kind = "none": change that'),
    case("config", "adapter settings of another kind", "dlm-train --adapter.kind lora --adapter.no-double_quant --train.init_from pico", 'double_quant = false is only read with kind = "qlora", and kind = "lora": change that'),
    # settings that nothing reads
    case("config", "a rule's setting without the rule", f"{LOAD} --sampler.threshold 0.01", "[sampler] threshold = 0.01 is only read by the rules threshold, hierarchical, credit", 'rule = "low_confidence"'),
    case("config", "a setting of another rule", f"{LOAD} --sampler.rule threshold --sampler.factor 9", "factor = 9 is only read by the rule factor"),
    case("config", "samples that are all the same", f"{LOAD} --sampler.num_samples 3", "num_samples = 3 is only read with a temperature above 0"),
    case("config", "a choice among tokens that are not drawn", f"{LOAD} --sampler.top_k 5", "top_k = 5 is only read with a temperature above 0"),
    case("config", "a limit of what has a length", f"{LOAD} --sampler.max_gen_length 64", 'max_gen_length = 64 is only read with gen_length = "auto"'),
    case("config", "blocks at a time, one after the other", f"{LOAD} --sampler.max_active_blocks 2", 'max_active_blocks = 2 is only read by strategy = "multi_block"'),
    case("config", "steps of edits without edits", f"{LOAD} --sampler.max_post_edit_steps 2", "max_post_edit_steps = 2 is only read with edit_threshold"),
    case("config", "a setting of another cache", f"{LOAD} --engine.refresh_interval 3", 'refresh_interval = 3 is only read by cache = "prefix" and "dual", and cache = "none"'),
    case("config", "a share of the memory for a known number of pages", f"{LOAD} --engine.memory_fraction 0.5 --engine.num_pages 9", "memory_fraction = 0.5 is only read without num_pages"),
    case("draft", "no tokens to draft", f"{LOAD} --draft.model ngram --sampler.draft_length 0", "draft_length = 0", "at least 1"),
    case("draft", "a draft's setting without a draft", f"{LOAD} --sampler.draft_length 4", "[sampler] draft_length is only read with a draft: set model in [draft]"),
    case("draft", "a line's setting without a draft", "dlm-infer --model.name ./model --input in.jsonl", "verify is only read with a draft", files={"in.jsonl": '{"prompt": "x", "sampler": {"verify": "reject"}}\n'}),
    case("draft", "lookup for a diffusion model", f"{LOAD} --draft.model ngram", "[draft] model: draft 'ngram' guesses what a causal model writes next", 'draft="self"'),
    case("draft", "an unknown name", f"{LOAD} --draft.model ngrm", "[draft] model: draft: no model 'ngrm'", 'did you mean "ngram"?'),
    case("draft", "a folder that is not there", f"{LOAD} --draft.model ./dflash", "no such folder"),
    case("draft", "a draft for holes", "dlm-infer --model.name ./model --draft.model self --prompt 'a [MASK:2]'", "[draft] model = 'self' continues texts, and this fills holes"),
    case("draft", "a diffusion model for itself", f"{LOAD} --draft.model ./model", "guesses what a causal model writes next"),
    case("draft", "too many guesses at itself", f"{LOAD} --draft.model self --sampler.draft_length 20", "draft_length = 20 is more than the 7 tokens"),
    case("draft", "rejection of its own guesses", f"{LOAD} --draft.model self --sampler.verify reject", 'verify = "reject" is not for draft = "self"'),
    case("config", "a job's setting that it does not read", MY, '[job.0.sampler] gamma = 0.3 is only read by the rule entropy_bound', files=config('[[job]]\nprompt = "x"\nsampler.gamma = 0.3')),
    case("config", "a line's setting that it does not read", "dlm-infer --input in.jsonl", "in.jsonl line 1: sampler: tau_low = 0.3 is only read by the rule hierarchical", files={"in.jsonl": '{"prompt": "x", "sampler": {"tau_low": 0.3}}\n'}),
    case("config", "another program's name", MY, 'unknown key "sampler.max_new_tokens"; here it is "gen_length"', files=config("[sampler]\nmax_new_tokens = 8")),
    case("config", "an unknown strategy", f"{LOAD} --sampler.strategy multiblock", "strategy = 'multiblock'", 'did you mean "multi_block"?'),
    case("config", "a shape beside a model", "dlm-train --train.init_from pico --model.hidden_size 64", "model.hidden_size = 64 shapes a new network, and train.init_from = 'pico' has its own shape"),
    case("config", "rows to keep that never come again", "dlm-train --replay.size 99", "size = 99 is only read with a fraction above 0"),
    case("data", "a tokenizer that is nowhere", "dlm-train --data.source text --data.paths a.txt --train.tokenizer pika", "no tokenizer 'pika'", "bundled models: pico, pico-block, pico-causal, ", "dlm-tokenizer makes", files={"a.txt": "some words " * 99}),
    case("data", "one text too short for a sequence", "dlm-train --data.source text --data.paths a.txt --train.tokenizer pico --train.out run", "train split of data.source = 'text' holds 1 documents with", "not one sequence of length 256; add data, or lower the length (train.length)", files={"a.txt": "some words"}),
    case("data", "one row, and nothing to hold out", "dlm-train --data.source jsonl --data.paths a.jsonl --train.tokenizer pico --train.length 8 --train.out run", "heldout split", "0 documents", "data.heldout_paths, or hold nothing out: data.heldout_fraction = 0 and eval.sequences = 0", files={"a.jsonl": json.dumps({"text": "some words " * 99})}),
    case("data", "a tokenizer's folder that cannot be written to", "dlm-tokenizer --output a.txt/out", "output = a.txt/out: cannot be written to (Not a directory): choose another folder", files={"a.txt": ""}),
    case("data", "shards in a folder that cannot be written to", "dlm-train --data.source text --data.paths a.txt --prepare a.txt/out", "--prepare a.txt/out: cannot be written to (Not a directory): choose another folder", files={"a.txt": ""}),
    case("checkpoint", "a text for a model without a tokenizer", "dlm-infer --model ./model/. --prompt x", "model './model/.' has no tokenizer: put a tokenizer.json into its folder, or give token ids", edit=without("tokenizer.json")),
    case("checkpoint", "training from a model without a tokenizer", "dlm-train --model ./model --data.source text --data.paths a.txt --train.out run", "train.init_from = './model' has no tokenizer.json, and text needs one", edit=without("tokenizer.json"), files={"a.txt": "some words"}),
    case("trace", "no store", "dlm-trace ls --store t.db", "t.db: there is no trace store here"),
    case("trace", "a text for a store", "dlm-trace ls --store t.db", "t.db: file is not a database", files={"t.db": "traces\n" * 99}),
    case("trace", "another program's database", "dlm-trace fsck --store t.db", "t.db: an SQLite file, but no trace store", files={"t.db": database("CREATE TABLE mine (x)")}),
    case("trace", "a store of the future", "dlm-trace ls --store t.db", "a trace store of version 7; this dlm reads up to 1", files={"t.db": database(*TABLES, f"PRAGMA application_id = {APPLICATION}", "PRAGMA user_version = 7")}),
    case("trace", "tables with a flipped bit", "dlm-trace ls --store t.db", "its tables are not those of a trace store", files={"t.db": STORE.replace(b"at INTEGER", b"at INTEGES")}),
    case("trace", "an empty store", "dlm-trace show first --store t.db", "none of this id; it is empty", files={"t.db": STORE}),
    case("trace", "fewer than no traces to keep", "dlm-trace gc --keep -1 --store t.db", "keep = '-1': give a number of traces, or an age", files={"t.db": STORE}),
    case("trace", "fewer than no traces to list", "dlm-trace ls -n -1 --store t.db", "argument -n: '-1' is no number from 0 to", files={"t.db": STORE}),
    case("trace", "too few traces to learn from", "dlm-trace train-dict --store t.db", "0 traces are too few to learn a dictionary from", files={"t.db": STORE}),
    # checkpoints: the run folder and what training leaves in it
    case("training", "the run folder is a file", "dlm-train --train.out my.toml", "train.out = 'my.toml': cannot write my.toml: File exists", "another train.out", files=config("")),
    case("training", "the run folder lies in a file", "dlm-train --train.out my.toml/run", "train.out = 'my.toml/run': cannot write my.toml", "Not a directory", files=config("")),
    case("training", "a learning rate that diverges", f"{TINY} --train.lr 1e30 --train.out run", "step 2: the loss is ", "gradient norm", "at learning rate", "Lower train.lr (now 1e+30)", "no checkpoint was written", files=config(SMALL)),
    case("training", "checkpoints from before", f"{TINY} --train.out run", "run/checkpoints: no checkpoint is whole (step-00000004: written by an earlier version of dlm, in pickles", "train.resume = false", files={**config(SMALL), "run/checkpoints/step-00000004/custom_checkpoint_0.pkl": b"cos\nsystem\n(S'true'\ntR."}),
    case("training", "a checkpoint without a manifest", f"{TINY} --train.out run", "(step-00000004: no manifest.json)", "Restore one from a copy", files={**config(SMALL), "run/checkpoints/step-00000004/state.json": b"{}"}),
    case("training", "a manifest of something else", f"{TINY} --train.out run", "(step-00000004: manifest.json is not what was written)", files={**config(SMALL), "run/checkpoints/step-00000004/manifest.json": b'{"step": "four"}'}),
    case("training", "a checkpoint that misses a file", f"{TINY} --train.out run", "(step-00000004: state.json is missing)", files={**config(SMALL), "run/checkpoints/step-00000004/manifest.json": b'{"format": 2, "step": 4, "files": {"state.json": {"size": 2, "blake2b": "00"}}}'}),
    case("training", "a latent model's setting misspelt", f"{TINY} --train.out run", '[trainable.own]: unknown key "chanels"; did you mean "channels"?', files=config(LATENT % "chanels = 8")),
    case("training", "a flow without an autoencoder", f"{TINY} --train.out run", '[trainable.own] stage = "flow" goes on from an autoencoder', "set train.init_from", files=config(LATENT % "stage = 'flow'")),
    case("training", "a setting of another kind of autoencoder", f"{TINY} --train.out run", 'latents = 8 is only read with kind = "perceiver"', files=config(LATENT % "latents = 8")),
    case("training", "a setting of another stage", f"{TINY} --train.out run", 'tau = 0.5 is only read with stage = "adapter"', files=config(LATENT % "tau = 0.5")),
    case("training", "a latent model from a Transformer", f"{TINY} --train.out run --train.init_from ./model", "train.init_from = './model' is a dlm network, which predicts tokens", files=config(LATENT % "stage = 'flow'")),
    case("training", "a network's shape for a latent model", f"{TINY} --train.out run --trainable.kind latent", "[model] is not read with trainable.kind = 'latent': leave it out", files=config(SMALL)),
    case("prompt", "a latent model's solver for another model", f"{LOAD} --sampler.solver heun", "solver = 'heun' is only read by latent models", "leave it out"),
    # hostile: names, checkpoints, templates and sizes (tests/hostile has 229 more)
    case("checkpoint", "a misspelt local folder", "dlm-infer --model.name runs/typo --prompt x", "runs/typo", "no such folder; did you mean runs/typed?", files={"runs/typed/notes.txt": ""}),
    case("checkpoint", "a name that is neither a folder nor on the hub", "dlm-infer --model.name some/thing --prompt x", "no such folder in", "as a hub id it cannot be downloaded"),
    case("checkpoint", "a million layers", LOAD, "num_hidden_layers = 1000000: Input should be less than or equal to 4096", edit=changed(num_hidden_layers=1_000_000)),
    case("checkpoint", "more layers than tensors", LOAD, "tensors: too few for the num_hidden_layers=4000", edit=changed(num_hidden_layers=4_000)),
    case("checkpoint", "a huge width", LOAD, "shape", "config.json asks for", edit=changed(hidden_size=1_000_000)),
    case("checkpoint", "a size as text", LOAD, "vocab_size = '300' should be a whole number", edit=changed(vocab_size="300")),
    case("checkpoint", "blocks of 2**31", LOAD, "block_length = 2147483648: Input should be less than or equal to", edit=changed(attention="block_causal", block_length=2**31)),
    case("checkpoint", "deeply nested JSON", LOAD, "config.json cannot be read as json: lists or objects are nested too deeply", edit=raw("config.json", '{"a":' * 100_000)),
    case("checkpoint", "an index that names files elsewhere", LOAD, "only safetensors files in the checkpoint's folder are read", edit=indexed(a="../x.safetensors")),
    case("checkpoint", "a tokenizer that is code", LOAD, "is code of its own, which is never run", edit=CHECKPOINTS["code for a tokenizer"][1]),
    case("checkpoint", "a template that never ends", "dlm-infer --chat --model.name ./model", "the chat template in model cannot render", "it takes more than 100,000 steps", edit=raw("chat_template.jinja", ENDLESS), stdin="hi\n"),
    case("checkpoint", "a template that is none", "dlm-infer --chat --model.name ./model", "the chat template in model cannot render", "(line 1)", edit=raw("chat_template.jinja", "{% for m in messages %}"), stdin="hi\n"),
    case("config", "a seed of 2**70", "dlm-infer --model.name ./model --prompt x --sampler.seed 1180591620717411303424", "sampler.seed = 1180591620717411303424: must be less than"),
    case("config", "a model of a million layers", "dlm-train --train.tokenizer ./model --train.out run --model.num_hidden_layers 1000000", "model.num_hidden_layers = 1000000: must be less than or equal to 4096"),
    case("config", "a model larger than the machine", "dlm-train --train.tokenizer ./model --train.out run --train.steps 50 --model.hidden_size 1048576 --model.intermediate_size 1048576", "[model]: the weights take", "GiB in all"),
    case("server", "a file of keys that is not there", "dlm-serve --serve.api_keys_file keys.txt", "serve.api_keys_file = 'keys.txt'", "cannot be read"),
    case("server", "a key that can be guessed", "dlm-serve --serve.api_keys_file keys.txt", "keys.txt: key 1 must be at least 8", files={"keys.txt": "secret"}),
    case("server", "an address of another machine", "dlm-serve --serve.host 192.0.2.1 --serve.port 0", "serve.host = '192.0.2.1'", "another --serve.port"),
    case("server", "an origin that is none", "dlm-serve --serve.cors_origins example.org", "'example.org' is no origin", "https://example.org"),
    case("server", "a seed for all", "dlm-serve --sampler.seed 3", "[sampler] seed is each request's own here"),
    case("server", "a queue in two places", "dlm-serve --engine.max_waiting 3", "[engine] max_waiting is set by [serve] max_waiting"),
    case("evaluation", "nothing to evaluate", "dlm-eval", "nothing to evaluate", "--config eval/pico"),
    case("evaluation", "a setting of another task", "dlm-eval --config my.toml", "shots = 3 is only read by tasks of kind mbpp, lm_eval", files=config('[[task]]\nkind = "sudoku"\nshots = 3')),
    case("evaluation", "a task without its data", "dlm-eval --model ./model --config my.toml", 'task "humaneval": data is missing', files=config('[[task]]\nkind = "humaneval"')),
    case("evaluation", "a draft for holes", "dlm-eval --model ./model --config my.toml", "a draft continues a text, and this task fills holes", files=config('[[task]]\nkind = "lines"\nlimit = 1\n[[decoding]]\ndraft = "self"')),
    case("evaluation", "a length without a draft", "dlm-eval --config my.toml", "draft_length = 3 is only read with a draft", files=config('[[decoding]]\ndraft_length = 3')),
    case("evaluation", "a folder that no task reads", "dlm-eval --eval.data x", "eval.data = x is only read by tasks with data"),
    case("evaluation", "no results", "dlm-eval --again my.json", "my.json holds no results of dlm-eval", files={"my.json": "{}"}),
    case("evaluation", "a file that holds no JSON", "dlm-eval --config eval/pico --output out.txt", "out.txt", "give a file that ends in .json"),
    case("evaluation", "what is gone", "dlm-bench quality", 'no such subcommand: "quality"'),
]  # fmt: skip


def make_model(folder: Path) -> None:
    """A checkpoint of a few hundred weights, with a byte tokenizer."""
    import torch

    from dlm.data.config import TokenizerConfig
    from dlm.data.tokenizer_training import train_tokenizer
    from dlm.models import LM, ModelConfig, Transformer

    config = TokenizerConfig(output=str(folder / "t"), vocab_size=300, min_frequency=1)
    made = train_tokenizer(config, ["some text " * 9])
    shape = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 1, "num_key_value_heads": 1}
    shape |= {"head_dim": 16, "intermediate_size": 32, "vocab_size": made.vocab_size}
    network = Transformer(ModelConfig(**shape, mask_token_id=made.mask_token_id, eos_token_id=made.eos_token_id))
    network.initialise(torch.Generator().manual_seed(0))
    LM(network, made, "tiny").save(folder / "model")


def run(entry: Case) -> tuple[int, str]:
    """Exit status and standard error of the case's command, in the current folder."""
    for name, content in entry.files.items():
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_bytes(content if isinstance(content, bytes) else content.encode())
    if "./model" in entry.argv or "./model" in str(entry.files):
        make_model(Path())
    show._load.cache_clear()  # another case's ./model
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
    assert status == 2 and err.startswith(f"{entry.argv.split()[0]}: ") and "Traceback" not in err, err
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
