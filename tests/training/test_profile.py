import json

import pytest
import torch
from torch import nn

from dlm.errors import UserError
from dlm.training import profile
from dlm.training.loop import go, train
from dlm.training.observing import ProfileConfig
from dlm.training.profile import OFF, Ranges, with_environment
from dlm.training.run import Run
from tests.refusals import refused
from tests.training.runs import config

PHASES = {"data", "forward", "backward", "optimiser"}
PARTS = {"views", "network", "loss"}
LAYERS = {"layer 0", "layer 1"}
WINDOW = {"profile__wait": "1", "profile__warmup": "1", "profile__active": "2"}


def names(folder, step):
    """The names of the ranges in an exported trace, as often as they occur."""
    events = json.loads((folder / "profile" / f"trace-step-{step:08d}.json").read_text())["traceEvents"]
    return [e["name"] for e in events if e.get("cat") == "user_annotation" and not e["name"].startswith("ProfilerStep")]


@pytest.mark.parametrize(("level", "known"), [("0", PHASES), ("2", PHASES | PARTS), ("3", PHASES | PARTS | LAYERS)])
def test_the_trace_has_the_ranges_of_its_level_and_of_active_steps_only(tmp_path, level, known):
    result = train(config(tmp_path, profile__level=level, profile__trace="true", eval__sequences="0", **WINDOW))
    found = [name for name in names(result.folder, 4) if not name.startswith("Optimizer.")]
    assert set(found) == known and found.count("backward") == 2
    assert [f.name for f in (result.folder / "profile").iterdir()] == ["trace-step-00000004.json"]


def test_off_makes_nothing(tmp_path, monkeypatch):
    forbidden = lambda *_, **__: pytest.fail("profiling is off")  # noqa: E731
    for name in ("_named", "record_function"):
        monkeypatch.setattr(profile, name, forbidden)
    monkeypatch.setattr(torch.profiler, "profile", forbidden)
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", forbidden)
    run = Run(config(tmp_path, train__steps="2"))
    assert run.profile.ranges("data") is OFF and run.profile.ranges("layer 0", 3) is OFF
    assert not any(layer._forward_hooks or layer._forward_pre_hooks for layer in run.network.layers)
    assert not (go(run).folder / "profile").exists()


def test_profiling_changes_no_loss(tmp_path):
    plain = train(config(tmp_path, "plain"))
    seen = train(config(tmp_path, "seen", profile__level="3", profile__trace="true", **WINDOW))
    assert seen.losses == plain.losses


def test_layers_stay_balanced_when_a_forward_fails():
    class Breaks(nn.Module):
        def forward(self, x):
            raise ValueError("no")

    module = Breaks()
    Ranges(3).name_layers(nn.ModuleList([module]))
    for _ in range(2):
        refused("no", module, 1, error=ValueError)
    (hook,) = module._forward_hooks.values()
    assert hook.__closure__[0].cell_contents == []


def test_a_run_too_short_for_the_window_says_so(tmp_path, capsys):
    train(config(tmp_path, train__steps="2", profile__trace="true", log__progress="true"))
    assert "profile.trace: the run ended after 2 steps, in the 5 + 2 before recording" in capsys.readouterr().err


def test_the_environment_adds_to_the_config(tmp_path, monkeypatch, capsys):
    assert with_environment(ProfileConfig(), {}) == ProfileConfig()
    found = with_environment(ProfileConfig(level=3), {"DLM_PROFILE": "2, trace"})
    assert found == ProfileConfig(level=2, trace=True)
    monkeypatch.setenv("DLM_PROFILE", "trace,memory")
    result = train(config(tmp_path, log__progress="true", **WINDOW))
    assert set(names(result.folder, 4)) >= PHASES
    if not torch.cuda.is_available():
        assert "there is no CUDA device: none is taken" in capsys.readouterr().err
    with pytest.raises(UserError, match="DLM_PROFILE = '2,tracing': 'tracing' is none of 0, 1, 2, 3, trace, memory"):
        with_environment(ProfileConfig(), {"DLM_PROFILE": "2,tracing"})


def test_layers_cannot_be_named_where_they_are_compiled(tmp_path):
    with pytest.raises(UserError, match="profile.level = 3 names layers, which train.compile fuses"):
        Run(config(tmp_path, profile__level="3", train__compile="true"))


@pytest.mark.gpu
def test_a_memory_snapshot_on_a_gpu(tmp_path):
    result = train(config(tmp_path, train__device="cuda", profile__memory="true", **WINDOW))
    assert (result.folder / "profile" / "memory-step-00000004.pickle").stat().st_size > 0
