"""llama.cpp's `llama-diffusion-cli` beside ours: full forwards of one LLaDA network with the same weights, one thread.

    python benchmarks/llama.py --cli llama.cpp/build/bin/llama-diffusion-cli
    python benchmarks/llama.py --cli … --shape small

The program is built from llama.cpp's source, which the sdist of llama-cpp-python holds in vendor/llama.cpp:

    cmake -B build -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON -DLLAMA_BUILD_EXAMPLES=ON && cmake --build build --target llama-diffusion-cli

Random weights, written as F32, Q8_0 and Q4_0 by the `gguf` package. Every step is one forward of the whole sequence without a
cache. Theirs is the wall-clock time a step that it prints; ours is all of `dlm.generate`, by its forwards.
Its greedy choice (`--top-k 1`) is sure of everything, so it writes from left to right; ours does in blocks of as many
tokens as a step commits, and must then write the same.
"""

import json
import re
import subprocess
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import cpu
import gguf
import torch
from measuring import RESULTS, Job, in_turns, machine, parser, ratios, spread, write

import dlm
from dlm.kernels.c import binding
from dlm.models import LM
from dlm.models.gguf_weights import NAMES
from dlm.models.subnormals import subnormals_as_zeros

PACKINGS = ("F32", "Q8_0", "Q4_0")
PRINTED = re.compile(r"time per step: ([\d.]+)ms")
OVER = {"fp32": ["F32"], "bf16": ["F32"], "q8": ["F32", "Q8_0", "Q4_0"]}
"""Whose time each of ours is divided by."""


@subnormals_as_zeros()
def main() -> int:
    words = parser(__doc__)
    words.add_argument("--cli", type=Path, required=True, help="llama-diffusion-cli")
    words.add_argument("--shape", choices=cpu.SHAPES, default="large")
    words.add_argument("--prompt", type=int, default=300, help="tokens (300)")
    words.add_argument("--gen", type=int, default=64, help="tokens generated (64)")
    words.add_argument("--steps", type=int, default=8, help="denoising steps (8)")
    words.add_argument("--rounds", type=int, default=3, help="turns of each contender (3)")
    words.add_argument("--output", type=Path, help="the JSON file")
    options = words.parse_args()
    torch.set_num_threads(1)
    lm = cpu.model(cpu.SHAPES[options.shape])
    prompt = torch.randint(0, 1000, (options.prompt,), generator=torch.Generator().manual_seed(1)).tolist()
    with tempfile.TemporaryDirectory() as folder:
        files = {packing: written(lm, packing, Path(folder) / f"{packing}.gguf") for packing in PACKINGS}
        rows = compared(lm, files, prompt, options)
    version = subprocess.run([options.cli, "--version"], capture_output=True, text=True, check=False)
    facts = machine() | {
        "kernels": binding.library()[1],
        "llama.cpp": (version.stdout + version.stderr).splitlines()[:2],
    }
    named = {key: str(value) for key, value in vars(options).items() if key != "cli"}
    report = {"machine": facts, "options": named, "rows": rows}
    print(json.dumps(report, indent=1))
    write(options.output or RESULTS / f"cpu-llama-{options.shape}.json", report)
    return 0


def compared(lm: LM, files: dict[str, Path], prompt: list[int], options: Any) -> dict[str, Any]:
    """Milliseconds a step of each, ratios within rounds, and how many tokens are the same."""
    half, small = cpu.narrowed(lm), cpu.narrowed(lm, quantised=True)
    shape = {"gen_length": options.gen, "steps": options.steps, "cache": "none"}

    def ours(which: LM, block: int) -> tuple[list[int], float]:
        before = time.perf_counter()
        (found,) = dlm.generate(which, [prompt], block_length=block, **shape)
        return found.tokens, (time.perf_counter() - before) / found.nfe * 1e3

    jobs: dict[str, Job] = {packing: partial(theirs, options, file, prompt) for packing, file in files.items()}
    jobs |= {name: partial(ours, which, options.gen) for name, which in (("fp32", lm), ("bf16", half), ("q8", small))}
    steps: dict[str, list[float]] = {name: [] for name in jobs}

    def noted(name: str, job: Job) -> list[int]:
        tokens, step = job()
        steps[name].append(step)
        return tokens

    _, results = in_turns({name: partial(noted, name, job) for name, job in jobs.items()}, options.rounds)
    rows: dict[str, Any] = {name: {"ms a step": min(steps[name][1:])} for name in jobs}
    for name, others in OVER.items():
        for other in others:
            rows[name][f"of {other}"] = spread(ratios(steps[name][1:], steps[other][1:]))
    straight = {"fp32": lm, "q8": small}
    for name, packing in (("fp32", "F32"), ("q8", "Q8_0")):
        tokens, _ = ours(straight[name], options.gen // options.steps)
        same = sum(a == b for a, b in zip(tokens, results[packing], strict=True))
        rows[name][f"same tokens as {packing}, left to right"] = f"{same} of {len(tokens)}"
    return rows


def theirs(options: Any, file: Path, prompt: list[int]) -> tuple[list[int], float]:
    """What it writes, and the milliseconds of a step."""
    length = str(len(prompt) + options.gen)
    command = [
        options.cli,
        "-m",
        file,
        "-t",
        "1",
        "-c",
        length,
        "-b",
        length,
        "-ub",
        length,
        "--top-k",
        "1",
        "--temp",
        "0",
    ]
    command += [
        "--diffusion-block-length",
        length,
        "--diffusion-steps",
        str(options.steps),
        "--diffusion-algorithm",
        "4",
    ]
    command += ["-p", "".join(f"<{token}>" for token in prompt), "--seed", "0"]
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, check=False)
    printed = done.stdout + done.stderr
    if (found := PRINTED.search(printed)) is None:
        raise SystemExit(f"{options.cli} printed no time:\n{printed[-2000:]}")
    return [int(token) for token in re.findall(r"<(\d+)>", printed[found.end() :])], float(found[1])


def written(lm: LM, packing: str, file: Path) -> Path:
    """The network as llama.cpp's converter writes LLaDA; token i is the text "<i>"."""
    c, kind = lm.config, gguf.GGMLQuantizationType[packing]
    writer = gguf.GGUFWriter(file, "llada")
    writer.add_embedding_length(c.hidden_size)
    writer.add_block_count(c.num_hidden_layers)
    writer.add_head_count(c.num_attention_heads)
    writer.add_head_count_kv(c.num_key_value_heads)
    writer.add_feed_forward_length(c.intermediate_size)
    writer.add_context_length(c.max_position_embeddings)
    writer.add_layer_norm_rms_eps(c.rms_norm_eps)
    writer.add_rope_freq_base(c.rope_theta)
    writer.add_rope_dimension_count(c.head_dim)
    writer.add_causal_attention(False)
    writer.add_bool("diffusion.shift_logits", False)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([f"<{i}>" for i in range(c.vocab_size)])
    writer.add_token_types([4] * c.vocab_size)  # defined by the user: found in a text, and shown
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(0)
    writer.add_mask_token_id(lm.require_mask_id())
    writer.add_add_bos_token(False)
    writer.add_chat_template("{% for m in messages %}{{ m.content }}{% endfor %}")
    for ours, tensor in lm.network.state_dict().items():
        layer = next((part for part in ours.split(".") if part.isdigit()), "")
        name = NAMES[re.sub(r"\.\d+\.", ".*.", ours).removesuffix(".weight")].replace("*", layer)
        values = tensor.numpy()
        if name.endswith(("attn_q", "attn_k")):  # `permute` of their conversion/llama.py: neighbours are rotated
            values = values.reshape(-1, 2, c.head_dim // 2, values.shape[1]).swapaxes(1, 2).reshape(values.shape)
        packed = kind if values.ndim == 2 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(f"{name}.weight", gguf.quantize(values, packed), raw_dtype=packed)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


if __name__ == "__main__":
    raise SystemExit(main())
