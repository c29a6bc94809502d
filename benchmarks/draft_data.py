"""What a draft learns from: its target's own answers against raw text, the target's states against none; and DFlash 2.

    python benchmarks/draft_data.py [--seeds 0 1 2] [--steps 150]                   # the tiny target of configs/dflash/
    python benchmarks/draft_data.py --config configs/dflash/pico.toml --steps 300 --train.batch_size 8 --output draft-data-pico.json

needs the answers that the config names: steps 1 to 3 of configs/dflash/, or
`dlm-prepare trajectories --config configs/dflash/pico-responses.toml`. Any setting of dlm-train may follow. Trains a draft
for each row and seed with the same steps, batches and shape, then decodes the same held-out beginnings of the standard
library with each: tau is the mean over all verifications. A draft that stands in its folder already is measured as it is.
"""

from itertools import islice
from pathlib import Path
from statistics import mean

from measuring import machine, parser, write

import dlm
from dlm.config import load
from dlm.data.config import DataConfig
from dlm.data.source import build_stream
from dlm.errors import UserError
from dlm.evaluation.table import markdown
from dlm.training.config import TrainConfig
from dlm.training.loop import train

FRACTION = "data.heldout_fraction"
RAW = {"data.source": "stdlib", "data.paths": "[]", FRACTION: str(DataConfig().heldout_fraction)}
ROWS: dict[str, dict[str, str]] = {
    "regenerated": {},
    "raw text": RAW,
    "regenerated, no context": {"draft.context": "false"},
    "regenerated, DFlash 2": {
        "draft.conv_kernel_size": "2",
        "draft.conv_group_size": "8",
        "draft.selector_rank": "16",
        "draft.selector_top_k": "8",
    },
}
SHORT = {"eval.sequences": "0", "checkpoint.every": "0", "log.progress": "false", "train.device": "cpu"}


def main() -> None:
    words = parser(__doc__)
    add = words.add_argument
    add("--config", default="configs/dflash/draft.toml")
    add("--seeds", type=int, nargs="+", default=[0, 1, 2])
    add("--steps", type=int, default=150)
    add("--rows", nargs="+", choices=[*ROWS], default=[*ROWS])
    add("--prompts", type=int, default=48)
    add("--temperature", type=float, default=0.0, help="of the texts that tau is measured on")
    add("--output", help="JSON file")
    args, rest = words.parse_known_args()
    if len(rest) % 2 or not all(name.startswith("--") for name in rest[::2]):
        raise UserError(f"settings of dlm-train follow as --section.field VALUE, not as {' '.join(rest)}")
    given = SHORT | {"train.steps": str(args.steps)} | {n[2:]: v for n, v in zip(rest[::2], rest[1::2], strict=True)}
    config = load(TrainConfig, [args.config], given)
    assert config.draft is not None, f"{args.config} has no [draft]"
    target = dlm.load(str(config.draft.target), dtype="float32", device="cpu")
    stream = build_stream(DataConfig(source="stdlib"), target.tokenizer, 64, "heldout", 0)
    prompts = [sample["input_ids"].tolist() for sample in islice(stream, args.prompts)]
    found: dict[str, list[float]] = {name: [] for name in args.rows}
    for seed in args.seeds:
        for name in args.rows:
            folder = Path(config.train.out).parent / f"{name.replace(', ', '-').replace(' ', '-')}-{seed}"
            own = {"train.out": str(folder), "train.seed": str(seed)} | ROWS[name]
            if not (folder / "finished.json").is_file():
                train(load(TrainConfig, [args.config], given | own))
            draft = dlm.load_draft(folder, target)
            written = dlm.generate(target, prompts, draft=draft, gen_length=64, temperature=args.temperature)
            found[name].append(mean([count for one in written for count in one.accepted or []]))
            print(f"seed {seed}  {name:24}  tau {found[name][-1]:.3f}", flush=True)
    rows = [
        {"row": name, **{str(seed): f"{tau:.3f}" for seed, tau in zip(args.seeds, taus, strict=True)}}
        for name, taus in found.items()
    ]
    headings = {"row": "tau of a draft trained on", **{str(seed): f"seed {seed}" for seed in args.seeds}}
    print(markdown(rows, headings))
    if args.output:
        about = {"config": args.config, "settings": given, "prompts": args.prompts, "temperature": args.temperature}
        write(Path(args.output), {"machine": machine(), **about, "tau": found})


if __name__ == "__main__":
    main()
