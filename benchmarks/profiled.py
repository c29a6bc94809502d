"""Where a GPU's time goes: torch.profiler over three block steps, its table printed and written.

python benchmarks/profiled.py --shape llada-8b --batch 1
"""

from pathlib import Path

import roofline
import torch
from measuring import RESULTS, machine, parser, write
from torch.profiler import ProfilerActivity, profile

import dlm


def main(argv: list[str] | None = None) -> int:
    words = parser(__doc__)
    words.add_argument("--shape", choices=list(roofline.SHAPES), default="tiny", help="the network (tiny)")
    words.add_argument("--batch", type=int, default=1, help="requests at a time (1)")
    words.add_argument("--context", type=int, default=1024, help="positions in the cache (1024)")
    words.add_argument("--output", type=Path, default=RESULTS / "profile.json", help="the JSON file")
    options = words.parse_args(argv)
    cuda = torch.cuda.is_available()
    lm = roofline.make(options.shape, device="cuda" if cuda else "cpu")
    exact, block = lm.config.attention == "block_causal", lm.config.block_length or 32
    report = {}
    for graphs in (True, False) if cuda else (False,):
        engine = dlm.Engine(
            lm,
            cache="exact" if exact else "dual",
            cuda_graphs=graphs,
            num_pages=options.batch * (options.context // 32 + 4),
        )
        for seed in range(options.batch):
            text = roofline.prompt(lm, options.context - block, seed)
            engine.add_request(text, gen_length=block, block_length=block, steps=block)
        for _ in range(min(8, block - 3)):
            engine.step()
        kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
        with profile(activities=kinds) as found:
            for _ in range(3):
                engine.step()
        order = "self_device_time_total" if cuda else "self_cpu_time_total"
        table = found.key_averages().table(sort_by=order, row_limit=25)
        print(f"graphs {'on' if graphs else 'off'}\n{table}", flush=True)
        report["graphs" if graphs else "launched"] = [
            {"name": e.key, "calls": e.count, "cpu_us": e.self_cpu_time_total, "device_us": e.self_device_time_total}
            for e in found.key_averages()
        ]
        engine.close()
    write(options.output, {"machine": machine("cuda" if cuda else "cpu"), "three_steps": report})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
