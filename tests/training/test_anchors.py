"""The cached teacher: the same run as under the live one, whole however often it was interrupted."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from dlm.config import to_toml
from dlm.errors import UserError
from dlm.models import AttentionSpec, load
from dlm.training.anchors import Anchors, keys, place, write_anchors
from dlm.training.loop import train
from dlm.training.run import Run
from tests.refusals import refused
from tests.training.runs import aligned


def contents(folder: Path) -> dict[str, bytes]:
    return {str(f.relative_to(folder)): f.read_bytes() for f in sorted(folder.rglob("*")) if f.is_file()}


@pytest.mark.parametrize("masking", ["random", "complementary"])
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("float16", 1e-3), ("bfloat16", 5e-3)])
def test_the_cached_teacher_gives_the_losses_of_the_live_one(base, tmp_path, dtype, tolerance, masking):
    options = {"align__sub_sample_ratio": "0.5", "objective__masking": masking, "train__steps": "4"}
    live = train(aligned(base, "live", **options, train__resume="false"))
    cached = {"align__anchors": str(tmp_path / "anchors"), "align__anchors_dtype": dtype}
    write_anchors(aligned(base, "cached", **options, **cached))
    losses = train(aligned(base, "cached", **options, **cached, train__resume="false")).losses
    assert losses == pytest.approx(live.losses, abs=tolerance)  # products differ in their last bits with the address


def test_a_file_holds_the_asked_layers_of_its_sequence(base, tmp_path):
    cfg = aligned(base, "run", align__anchors=str(tmp_path), align__layers="[1]", align__anchors_dtype="float32")
    done = write_anchors(cfg)
    assert done.sequences == 32 and 0 < done.written <= 32
    run = Run(cfg)
    ids, taps = run._batch().input_ids, {}
    teacher = load(base / "ar", device="cpu").network
    with torch.no_grad():
        teacher.hidden(ids, attention=AttentionSpec("causal"), taps=taps)
    for row, key in enumerate(keys(ids)):
        stored = load_file(place(tmp_path, key))
        assert stored.keys() == {"1"}
        torch.testing.assert_close(stored["1"], taps[1][row], rtol=1e-5, atol=1e-6)


KILLED = """
import os, sys
from pathlib import Path
from dlm.cli import prepare
replace, left = Path.replace, [20 + 1]  # twenty sequences, after the manifest
def killed(path, target):
    left[0] -= 1
    if left[0] < 0:
        os.kill(os.getpid(), 9)
    return replace(path, target)
Path.replace = killed
sys.exit(prepare.main(sys.argv[1:]))
"""


def test_an_interrupted_preparation_ends_as_one_that_was_not(base, tmp_path):
    options = {"train__steps": "100", "data__heldout_fraction": "0"}
    straight = aligned(base, "a", align__anchors=str(tmp_path / "straight"), **options)
    write_anchors(straight)
    broken = aligned(base, "b", align__anchors=str(tmp_path / "broken"), **options)
    (tmp_path / "c.toml").write_text(to_toml(broken))
    command = [sys.executable, "-c", KILLED, "anchors", "--config", str(tmp_path / "c.toml")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL
    assert "400 sequences of 0.001 MB: 0.4 MB at most" in done.stderr
    before = contents(tmp_path / "broken")
    whole = [name for name in before if not Path(name).name.startswith(".")]
    assert len(whole) == 20 + 1 < len(contents(tmp_path / "straight")) and len(before) == 22  # one was being written
    (tmp_path / "broken" / "00").mkdir(exist_ok=True)
    (tmp_path / "broken" / "00" / ".00.safetensors.half").write_bytes(b"half of it")
    done = write_anchors(broken)
    assert 0 < done.written < done.sequences
    assert contents(tmp_path / "broken") == contents(tmp_path / "straight")
    assert write_anchors(broken).written == 0


def test_a_missing_sequence_is_named_with_the_command_that_writes_it(base, tmp_path):
    cfg = aligned(base, "run", align__anchors=str(tmp_path))
    write_anchors(cfg)
    run = Run(cfg)
    path = place(tmp_path, keys(run._batch().input_ids)[2])
    path.unlink()
    refused(f"{path} is missing: .* dlm-prepare anchors --config FILE", Run(cfg).optimiser_step)
    path.write_bytes(b"torn")
    refused("is not a whole file .*: delete it and run dlm-prepare anchors", Run(cfg).optimiser_step)


def test_anchors_of_something_else_are_refused(base, tmp_path):
    options = {"align__anchors": str(tmp_path / "anchors"), "train__steps": "2", "align__layers": "[0]"}
    cfg = aligned(base, "run", **options)
    write_anchors(cfg)
    with pytest.raises(UserError, match=r"holds layers \[0\], but align.layers asks for \[1\]"):
        Anchors(aligned(base, "run", **options | {"align__layers": "[1]"}), (1,))
    with pytest.raises(UserError, match="sequences of 16 tokens, but train.length = 8"):
        Anchors(aligned(base, "run", **options, train__length="8"), (0,))
    with pytest.raises(UserError, match="holds states of layers .* not .*: give an empty folder"):
        write_anchors(aligned(base, "run", **options | {"align__layers": "[1]"}))
    lm = load(base / "ar", device="cpu")
    lm.network.norm.weight.data[0] += 1
    lm.save(tmp_path / "other")
    with pytest.raises(UserError, match="which .*other.* has not: set align.teacher to that model"):
        Run(aligned(base, "run", **options, align__teacher=str(tmp_path / "other")))
    refused("align.anchors is not set", write_anchors, aligned(base, "run"))
