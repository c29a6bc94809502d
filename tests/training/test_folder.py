import errno
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from dlm.cli import train as command
from dlm.config import to_toml
from dlm.errors import UserError
from dlm.models import weights
from dlm.training import checkpoint, folder
from dlm.training.loop import go, train
from dlm.training.run import Run
from tests.refusals import failing, refused
from tests.training.runs import config, rows

HOLDER = """
import sys
from pathlib import Path
from dlm.training.folder import claimed
with claimed(Path(sys.argv[1])):
    print("locked", flush=True)
    sys.stdin.read()
"""


def holder(out: Path) -> subprocess.Popen[str]:
    """A process that has the folder until its stdin is closed or it is killed."""
    process = subprocess.Popen([sys.executable, "-c", HOLDER, str(out)], stdin=-1, stdout=-1, text=True)
    assert process.stdout is not None and process.stdout.readline() == "locked\n"
    return process


def test_a_second_run_in_the_folder_is_refused_until_the_first_is_gone(tmp_path, capsys):
    cfg = config(tmp_path, train__steps="2", eval__sequences="0")
    (tmp_path / "my.toml").write_text(to_toml(cfg))
    first = holder(tmp_path / "run")
    assert command.main(["--config", str(tmp_path / "my.toml")]) == 2
    said = capsys.readouterr().err
    assert f"in use by process {first.pid} on {os.uname().nodename}" in said and "another train.out" in said
    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == [".lock"]  # nothing of the second run
    first.send_signal(signal.SIGKILL)
    first.communicate()
    assert command.main(["--config", str(tmp_path / "my.toml")]) == 0


FORKED = """
import os, sys
from pathlib import Path
from dlm.training.folder import claimed
folder, (reading, writing), alive = Path(sys.argv[1]), os.pipe(), os.pipe()
with claimed(folder):
    child = os.fork()
    if child == 0:
        os.close(writing)
        os.write(alive[1], b"x")
        os.read(reading, 1)  # until the parent is done
        os._exit(0)
    os.read(alive[0], 1)
with claimed(folder):  # released, though the child lives
    print(os.waitpid(child, os.WNOHANG))
os.close(writing)
os.waitpid(child, 0)
"""


def test_a_child_that_is_left_behind_does_not_hold_the_folder(tmp_path):
    done = subprocess.run([sys.executable, "-c", FORKED, str(tmp_path)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "(0, 0)\n"), done.stderr


def test_where_there_are_no_locks_a_run_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr(folder.fcntl, "flock", failing(errno.ENOLCK))
    with folder.claimed(tmp_path), folder.claimed(tmp_path):
        pass


def test_resuming_and_being_finished_are_said(tmp_path, capsys):
    more = {"train__steps": "4", "checkpoint__every": "2"}
    straight = train(config(tmp_path, **more))
    model = (tmp_path / "run" / "model.safetensors").stat()
    written = (model.st_mtime_ns, model.st_ino)
    capsys.readouterr()
    again = train(config(tmp_path, **more))
    done = "already at step 4 of 4: nothing to do; set train.resume = false to train it again or give another train.out"
    assert capsys.readouterr().err == done + "\n"
    assert (again.steps, again.losses, again.bound) == (4, [], straight.bound)
    after = (tmp_path / "run" / "model.safetensors").stat()
    assert (after.st_mtime_ns, after.st_ino) == written and len([r for r in rows(tmp_path / "run") if "loss" in r]) == 4
    (tmp_path / "my.toml").write_text(to_toml(config(tmp_path, **more)))
    assert command.main(["--config", str(tmp_path / "my.toml")]) == 0
    said = capsys.readouterr()
    assert "already at step 4 of 4" in said.err and "load it with dlm.load(" in said.out
    # Without its final model the run is not finished: the model is written from the last checkpoint.
    (tmp_path / "run" / "model.safetensors").unlink()
    assert train(config(tmp_path, **more)).losses == []
    assert f"resuming from step 4 of {tmp_path / 'run'}" in capsys.readouterr().err
    assert (tmp_path / "run" / "model.safetensors").stat().st_size == model.st_size


def test_a_finished_run_that_may_be_extended_says_how(tmp_path, capsys):
    more = {"train__schedule": "constant", "checkpoint__every": "2", "eval__sequences": "0"}
    train(config(tmp_path, train__steps="2", **more))
    train(config(tmp_path, train__steps="2", **more))
    done = "already at step 2 of 2: nothing to do; raise train.steps or give another train.out"
    assert done in capsys.readouterr().err
    assert len(train(config(tmp_path, train__steps="4", **more)).losses) == 2
    assert f"resuming from step 2 of {tmp_path / 'run'}\n" in capsys.readouterr().err


def test_without_checkpoints_a_finished_run_is_finished_and_another_config_begins_anew(tmp_path, capsys):
    first = train(config(tmp_path, train__steps="2", eval__sequences="0"))
    assert train(config(tmp_path, train__steps="2", eval__sequences="0", log__every="5")).losses == []
    assert "already at step 2 of 2" in capsys.readouterr().err
    other = train(config(tmp_path, train__steps="2", eval__sequences="0", train__lr="0.5"))
    assert len(other.losses) == 2 and other.losses != first.losses
    (tmp_path / "run" / "finished.json").write_text('{"step": 2, "config"')
    assert len(train(config(tmp_path, train__steps="2", eval__sequences="0", train__lr="0.5")).losses) == 2


def test_a_disk_that_fills_up_leaves_the_older_checkpoint(tmp_path, monkeypatch):
    run = Run(config(tmp_path))
    run.optimiser_step()
    run.save_checkpoint()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))  # a real error in the middle of a file
    try:
        refused(r"checkpoint of step 1 could not be written: .*too large.*step-00000001 is", run.save_checkpoint)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "sync", failing(errno.ENOSPC))
        run.optimiser_step()
        refused("step 2 could not be written: No space left on device; step-00000001 is still", run.save_checkpoint)
    assert [p.name for p in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-00000001"]
    again = Run(config(tmp_path))
    again.resume()
    assert again.step == 1


def test_a_full_disk_under_metrics_or_the_final_model_is_said(tmp_path, monkeypatch):
    run = Run(config(tmp_path, eval__sequences="0"))
    step = run.optimiser_step

    def stepping():
        (tmp_path / "run" / "metrics.jsonl").unlink()
        (tmp_path / "run" / "metrics.jsonl").symlink_to("/dev/full")
        return step()

    run.optimiser_step = stepping
    refused(r"cannot write .*: No space left on device; make room or give another train.out", go, run)
    shutil.rmtree(tmp_path / "run")
    monkeypatch.setattr(weights, "save_file", failing(errno.ENOSPC))
    refused("No space left", train, config(tmp_path, train__steps="2", eval__sequences="0", checkpoint__every="2"))
    monkeypatch.undo()
    assert [p.name for p in checkpoint.found(tmp_path / "run" / "checkpoints")] == ["step-00000002"]
    train(config(tmp_path, train__steps="2", eval__sequences="0", checkpoint__every="2"))
    assert (tmp_path / "run" / "model.safetensors").is_file()


def test_a_folder_that_cannot_be_written_is_found_out_before_anything_else(tmp_path, monkeypatch):
    cfg = config(tmp_path, train__init_from=str(tmp_path / "is not read"))
    (tmp_path / "file").write_text("")
    for out, why in (("file", "File exists"), ("file/run", "Not a directory")):
        with pytest.raises(UserError, match=f"train.out = .*{out}.*: cannot write .*: {why}; .* another train.out"):
            train(cfg.model_copy(update={"train": cfg.train.model_copy(update={"out": str(tmp_path / out)})}))
    monkeypatch.setattr(folder.os, "open", failing(errno.EACCES, str(tmp_path / "run" / ".lock")))
    refused(r"cannot write .*\.lock: Permission denied", train, cfg)


def test_lines_of_metrics_that_are_none_are_dropped(tmp_path):
    train(config(tmp_path, train__steps="2", eval__sequences="0"))
    lines = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    (tmp_path / "run" / "metrics.jsonl").write_bytes(b'[3]\n{"loss": 1}\n\xff\xfe\n' + lines + b'{"step": 3, "lo')
    go(Run(config(tmp_path, train__steps="2", eval__sequences="0", checkpoint__every="1", train__resume="false")))
    assert [r["step"] for r in rows(tmp_path / "run")] == [1, 2]
    assert json.loads((tmp_path / "run" / "finished.json").read_text())["step"] == 2
