"""Decoding on one compute path against another: the same requests, taking turns, so that a busy machine slows both alike.

    python benchmarks/paths.py                   # C against torch, one thread
    python benchmarks/paths.py --seconds 30 c torch

Prints the median of the ratios of neighbouring runs, and their quartiles.
"""

import argparse
import statistics
import time

import torch

import dlm
from dlm.models import LM, ModelConfig, Transformer

SHAPES = {  # width, layers, feed-forward
    "small: width 256, 4 layers": (256, 4, 704),
    "mid: width 768, 12 layers": (768, 12, 2048),
}
BLOCK = {"gen_length": 32, "block_length": 32, "steps": 8}


def model(width: int, layers: int, wide: int) -> LM:
    """Random weights in fp32."""
    config = ModelConfig(
        model_type="llada", vocab_size=8192, hidden_size=width, num_hidden_layers=layers, num_attention_heads=width // 64,
        num_key_value_heads=width // 64, head_dim=64, intermediate_size=wide, mask_token_id=1, mask_in_softmax=True,
        initializer_range=0.02,
    )  # fmt: skip
    network = Transformer(config)
    network.initialise(torch.Generator().manual_seed(0))
    return LM(network.eval(), None, "random")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="*", default=["c", "torch"], help="two of triton, c, torch")
    parser.add_argument("--seconds", type=float, default=8.0, help="for each shape and batch")
    options = parser.parse_args()
    torch.set_num_threads(1)
    for name, shape in SHAPES.items():
        for batch in (1, 8):
            prompts = [list(range(2 + i, 66 + i)) for i in range(batch)]
            lm = model(*shape)
            engines = [dlm.Engine(lm, cache="dual", kernels=path) for path in options.paths]
            seconds: list[list[float]] = []
            end = time.monotonic() + options.seconds
            while len(seconds) < 4 or time.monotonic() < end:
                seconds.append([])
                for engine in engines:
                    start = time.process_time()
                    engine.generate(prompts, **BLOCK)
                    seconds[-1].append(time.process_time() - start)
            low, middle, high = statistics.quantiles([a / b for a, b in seconds[1:]], n=4)
            took = f"{options.paths[0]} takes {middle:.2f} ({low:.2f}–{high:.2f}) of {options.paths[1]}'s time"
            print(f"{name}, {batch} requests: {took}", flush=True)


if __name__ == "__main__":
    main()
