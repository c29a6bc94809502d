"""Every hostile input in turn, in a process with little memory. `python -m tests.hostile.run` prints what each gets."""

import contextlib
import io
import json
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import dlm
from dlm.data import chat
from dlm.models import adapters
from tests.hostile.checkpoints import CHECKPOINTS
from tests.hostile.templates import TEMPLATES
from tests.models import tiny

ROOM = 2**30
"""Bytes that all inputs together may take beside what is there when they begin."""
TALK = [{"role": "user", "content": "hi"}]


def make(folder: Path) -> None:
    """A good checkpoint of each kind, by name."""
    for case in ("dlm", "dlm-moe", "dlm-learned", "llama", "llada", "llada_moe", "llada2_moe", "sdar"):
        tiny.model(case).save(folder / case)
    tiny.model("dlm", tie_word_embeddings=True, qk_norm=False).save(folder / "tied")
    with contextlib.suppress(dlm.UserError):  # without peft there is no adapter to spoil
        lm = tiny.model("dlm")
        adapters.attach(lm.network, 2, 4.0, base=str(folder / "dlm"))
        lm.save(folder / "adapter")
    from tests.test_bad_inputs import make_model

    make_model(folder)
    (folder / "model").rename(folder / "text")


def cases(folder: Path) -> dict[str, Callable[[], Any]]:
    """What is called for each input, by name; a checkpoint is spoilt before."""
    made: dict[str, Callable[[], Any]] = {}
    for number, (name, (kind, spoil)) in enumerate(CHECKPOINTS.items()):
        if (folder / kind).is_dir():
            shutil.copytree(folder / kind, folder / str(number))
            spoil(folder / str(number))
            made[f"checkpoint: {name}"] = lambda path=folder / str(number): dlm.load(path, device="cpu")
    for name, template in TEMPLATES.items():
        made[f"template: {name}"] = lambda template=template: chat.render(template, TALK, True)
    lm = dlm.load(folder / "text", device="cpu")
    for name, options in SETTINGS.items():
        made[f"setting: {name}"] = lambda options=options: dlm.generate(lm, ["x"], **{"gen_length": 8, **options})
    return made


SETTINGS: dict[str, dict[str, Any]] = {"a seed of 2**70": {"seed": 2**70}, "a seed below nothing": {"seed": -1}}
SETTINGS |= {"a seed as text": {"seed": "0"}, "a block of 2**31": {"block_length": 2**31, "gen_length": 2**31}}
SETTINGS |= {"a block of 2**70": {"block_length": 2**70, "gen_length": 2**70}}
SETTINGS |= {"a block of nothing": {"block_length": 0}, "a temperature as NaN": {"temperature": float("nan")}}
SETTINGS |= {"a temperature as infinity": {"temperature": float("inf")}}
SETTINGS |= {"guidance as infinity": {"cfg_scale": float("inf")}}


def outcome(call: Callable[[], Any]) -> dict[str, Any]:
    """How a call ends, and after how many seconds."""
    started = time.perf_counter()
    kind, said = "nothing", ""
    try:
        call()
    except Exception as error:
        kind, said = type(error).__name__, str(error)
    return {"kind": kind, "said": said[:2000], "seconds": time.perf_counter() - started}


def run() -> dict[str, dict[str, Any]]:
    """The outcome of every input."""
    with tempfile.TemporaryDirectory() as name, contextlib.redirect_stdout(io.StringIO()):
        folder = Path(name)
        make(folder)
        made = cases(folder)
        chat.render("warm", TALK, True)
        if (folder / "adapter").is_dir():  # so that no case pays for an import
            dlm.load(folder / "adapter", device="cpu")
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + ROOM, used + ROOM))
        return {name: outcome(call) for name, call in made.items()}


def main() -> None:
    found = run()
    if "--json" in sys.argv:
        print(json.dumps(found))
        return
    for name, one in found.items():
        print(f"{one['seconds']:6.3f} s  {one['kind']:10}  {name}: {one['said'][:160]}")
    good = [one for one in found.values() if one["kind"] == "UserError"]
    seconds, slowest = max((one["seconds"], name) for name, one in found.items())
    print(f"{len(good)} of {len(found)} end in a UserError; the slowest after {seconds:.2f} s ({slowest})")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
