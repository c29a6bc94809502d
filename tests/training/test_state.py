import builtins
import json
import math
import pickle
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from accelerate import DistributedType
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from dlm.errors import UserError
from dlm.training import state
from dlm.training.run import Run
from tests.training.runs import config

WATCHED: list[str] = []
STATES = (
    {"a": [1, 2.5, None, True, "x\ud800\u2028"], "b": {}},
    {"t": (1, (2, [3, ()])), "bytes": b"\x00\xff", 3: "int key", None: 1, (1, 2): "tuple key"},
    {"__tuple__": [1], "__bytes__": "x"},
    {"one": {"__pairs__": 1}},
    [0.1 + 0.2, 1e-320, -0.0, 2**70, math.inf],
)


@pytest.mark.parametrize("value", STATES, ids=range(len(STATES)))
def test_plain_data_comes_back_as_it_was(value):
    text = state.dumps(value)
    text.encode("utf-8")
    again = state.loads(text)
    assert again == value and repr(again) == repr(value)  # also 1 and True, tuples and lists


def test_what_is_not_plain_is_named():
    assert state.loads(state.dumps({"n": np.int64(3), "x": np.float64(0.5)})) == {"n": 3, "x": 0.5}
    with pytest.raises(UserError, match=r"state\.data\.rows\[1\] is a object, which no checkpoint holds"):
        state.dumps({"data": {"rows": [1, object()]}})


@pytest.fixture
def unpickling():
    """Names that are looked up by an unpickler while the test runs."""
    if not WATCHED:
        WATCHED.append("off")
        sys.addaudithook(lambda event, args: WATCHED.append(str(args)) if event == "pickle.find_class" and WATCHED[0] == "on" else None)  # fmt: skip
    WATCHED[:] = ["on"]
    yield WATCHED
    WATCHED[:] = ["off"]


def test_nothing_is_unpickled_on_resume(tmp_path, monkeypatch, unpickling):
    first = Run(config(tmp_path, train__ema="0.9"))
    first.optimiser_step()
    first.save_checkpoint()
    at = tmp_path / "run" / "checkpoints" / "step-00000001"
    assert {file.suffix for file in at.iterdir()} == {".json", ".safetensors"}
    for name in ("custom_checkpoint_0.pkl", "optimizer.bin", "random_states_0.pkl", "scheduler.bin", "model.bin"):
        (at / name).write_bytes(pickle.dumps(Evil()))

    for module, name in ((torch, "load"), (pickle, "load"), (pickle, "loads")):
        monkeypatch.setattr(module, name, lambda *_, **__: pytest.fail("unpickled"))
    second = Run(config(tmp_path, train__ema="0.9"))
    second.resume()
    assert second.step == 1 and unpickling == ["on"] and not hasattr(builtins, "dlm_was_here")


class Evil:
    def __reduce__(self):
        return exec, ("import builtins; builtins.dlm_was_here = True",)


CPU = {"device": torch.device("cpu"), "distributed_type": DistributedType.NO}
ALONE = SimpleNamespace(process_index=0, num_processes=1, is_main_process=True, **CPU)


def net(seed: int, width: int = 3) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    module = nn.Sequential(nn.Linear(width, 5), nn.Linear(5, 2))
    optimizer = torch.optim.AdamW(module.parameters())
    module(torch.randn(4, width)).sum().backward()
    optimizer.step()
    return module, optimizer


def test_another_number_of_processes_reads_the_parts(tmp_path):
    """Rows in two files, as two processes of FSDP write them, read by one."""
    module, optimizer = net(0)
    state.save(tmp_path, ALONE, module, optimizer, {"step": 7})
    for kind in ("model", "optimizer"):
        whole = tmp_path / f"{kind}.safetensors"
        with safe_open(whole, "pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        whole.unlink()
        for part, rows in enumerate((slice(0, 3), slice(3, 9))):
            here = {n: t[rows] if t.ndim else t for n, t in tensors.items()}
            mine = {n: t for n, t in here.items() if (t.numel() if tensors[n].ndim else part == 0)}
            where = {n: (rows.start if tensors[n].ndim else 0, len(tensors[n]) if tensors[n].ndim else 1) for n in mine}
            name = tmp_path / f"{kind}-{part}-of-2.safetensors"
            save_file({n: t.contiguous() for n, t in mine.items()}, name, metadata={"rows": json.dumps(where)})
    other, its = net(1)
    assert state.load(tmp_path, ALONE, other, its) == {"step": 7}
    assert all(torch.equal(a, b) for a, b in zip(module.parameters(), other.parameters(), strict=True))
    for one, two in zip(module.parameters(), other.parameters(), strict=True):
        a, b = optimizer.state[one], its.state[two]
        assert a.keys() == b.keys() and all(torch.equal(a[key], b[key]) and a[key].dtype == b[key].dtype for key in a)


def test_another_network_is_refused(tmp_path):
    state.save(tmp_path, ALONE, *net(0), {})
    with pytest.raises(
        UserError, match=r"'0.weight' is torch.float32 \(5, 3\), but in this network .* \(5, 4\); resume"
    ):
        state.load(tmp_path, ALONE, *net(0, width=4))
    module = nn.Sequential(nn.Linear(3, 5))
    with pytest.raises(UserError, match=r"tensor '1.bias' is in this network or in the checkpoint, not both"):
        state.load(tmp_path, ALONE, module, torch.optim.AdamW(module.parameters()))
