"""What a draft learns from: its target's own answers against raw text, the target's states against none; and DFlash 2.

    python benchmarks/draft_data.py [--seeds 0 1 2] [--steps 150]                   # the tiny target of configs/dflash/
    python benchmarks/draft_data.py --config configs/dflash/pico.toml --steps 1000 --train.batch_size 8 --output draft-data-pico.json

needs the answers that the config names: steps 1 to 3 of configs/dflash/, or
`dlm-prepare trajectories --config configs/dflash/pico-responses.toml`. Any setting of dlm-train may follow. Trains a draft
for each row and seed with the same steps, batches and shape, then writes on from the same held-out beginnings of the
standard library with each, at each temperature: tau is the mean over all verifications, and the difference from the first
row has its bootstrap interval over the texts. A draft that stands in its folder already is measured as it is.
"""

from itertools import islice, product
from pathlib import Path
from typing import Any

from measuring import machine, parser, write

import dlm
from dlm.config import load
from dlm.data.config import DataConfig
from dlm.data.source import build_stream
from dlm.errors import UserError
from dlm.evaluation.suite.compare import paired
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
    add("--prompts", type=int, default=192)
    add("--beginnings", type=int, nargs="+", default=[32, 64], help="tokens that a text begins with (32 64)")
    add(
        "--temperatures", type=float, nargs="+", default=[0.0, 0.8], help="of the texts that tau is measured on (0 0.8)"
    )
    add("--output", help="JSON file")
    args, rest = words.parse_known_args()
    if len(rest) % 2 or not all(name.startswith("--") for name in rest[::2]):
        raise UserError(f"settings of dlm-train follow as --section.field VALUE, not as {' '.join(rest)}")
    given = SHORT | {"train.steps": str(args.steps)} | {n[2:]: v for n, v in zip(rest[::2], rest[1::2], strict=True)}
    config = load(TrainConfig, [args.config], given)
    assert config.draft is not None, f"{args.config} has no [draft]"
    target = dlm.load(str(config.draft.target), dtype="float32", device="cpu")
    beginnings = {length: _beginnings(target, length, args.prompts) for length in args.beginnings}
    found: list[dict[str, Any]] = []
    for seed in args.seeds:
        texts: dict[tuple[int, float], tuple[list[float], list[float]]] = {}  # of the first row
        for name in args.rows:
            folder = Path(config.train.out).parent / f"{name.replace(', ', '-').replace(' ', '-')}-{seed}"
            own = {"train.out": str(folder), "train.seed": str(seed)} | ROWS[name]
            if not (folder / "finished.json").is_file():
                train(load(TrainConfig, [args.config], given | own))
            draft = dlm.load_draft(folder, target)
            for case in product(args.beginnings, args.temperatures):
                written = dlm.generate(target, beginnings[case[0]], draft=draft, gen_length=64, temperature=case[1])
                told = [one.accepted or [] for one in written]
                kept, verified = [float(sum(one)) for one in told], [float(len(one)) for one in told]
                point = {"row": name, "seed": seed, "beginning": case[0], "temperature": case[1]}
                point["tau"] = sum(kept) / sum(verified)
                if case in texts:
                    first, sizes = texts[case]
                    point["against"] = paired(kept, first, sizes=(verified, sizes))
                texts.setdefault(case, (kept, verified))
                found.append(point)
                print(f"seed {seed}  {name:24}  {case[0]} tokens, T = {case[1]:g}: {_cell(point)}", flush=True)
    rows = [
        {"row": name, "case": f"{length} tokens, T = {heat:g}"}
        | {
            str(point["seed"]): _cell(point)
            for point in found
            if (point["row"], point["beginning"], point["temperature"]) == (name, length, heat)
        }
        for length, heat, name in product(args.beginnings, args.temperatures, args.rows)
    ]
    seeds = {str(seed): f"seed {seed}" for seed in args.seeds}
    print(markdown(rows, {"case": "texts", "row": "tau of a draft trained on", **seeds}))
    if args.output:
        write(
            Path(args.output),
            {"machine": machine(), "config": args.config, "settings": given, "prompts": args.prompts, "tau": found},
        )


def _beginnings(target: dlm.LM, length: int, count: int) -> list[list[int]]:
    stream = build_stream(DataConfig(source="stdlib"), target.tokenizer, length, "heldout", 0)
    return [sample["input_ids"].tolist() for sample in islice(stream, count)]


def _cell(point: dict[str, Any]) -> str:
    against = point.get("against")
    less = f" ({against['difference']:+.3f}, {against['low']:+.3f} to {against['high']:+.3f})" if against else ""
    return f"{point['tau']:.3f}{less}"


if __name__ == "__main__":
    main()
