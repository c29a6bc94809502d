"""A GPU that is none: tensors that say they are on `cuda`, hold their values on the CPU, and notice what a GPU would mind.

Every operation on them is a launch, every way from them to the host a wait. `captures` records operations with the very
tensors they read and wrote, as a CUDA graph does, and a replay runs just these: a number that was taken from the host while
recording stays what it was, and what another recording computed is gone. Kernels are stood in for by their twins.
"""

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_map

from dlm.inference import compute, engine, memory
from dlm.inference.step import Stepper
from dlm.kernels import paths, reference
from dlm.kernels.c import native
from dlm.kernels.spans import Spans
from dlm.models import LM
from dlm.models.packing import pack

READS = {"item", "tolist", "numpy", "cpu", "__bool__", "__int__", "__float__", "__index__", "__contains__", "__iter__"}
WAITS = {"nonzero", "masked_select", "equal", "allclose", "bincount", "unique", "repeat_interleave"}
ASKED = {"dim", "size", "stride", "numel", "__len__", "element_size", "is_contiguous", "is_floating_point", "nelement"}
ASKED |= {"untyped_storage", "storage_offset", "get_device", "is_inference", "requires_grad_", "__hash__"}
LAUNCHES = {"route": 2, "mixture": 4, "confidence": 2}
"""Of kernels that are several. Attention is two where a span can be cut."""
CHUNK = 256
WIDE = {"linear", "matmul"}
"""Computed in double precision, so that a row's result does not depend on the other rows."""


@dataclass
class Counts:
    """What one step did."""

    launches: int = 0
    uploads: int = 0
    pinned: int = 0
    captures: int = 0
    replays: int = 0
    waits: list[str] = field(default_factory=list)
    """Where the host waited for the device: a file and a line each."""


class Remote(Tensor):
    """A tensor on the GPU."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor, gpu: "FakeGPU") -> "Remote":
        facts = {"strides": inner.stride(), "storage_offset": inner.storage_offset(), "dtype": inner.dtype}
        made = Tensor._make_wrapper_subclass(cls, inner.shape, device="cuda:0", **facts)
        made.inner, made.gpu = inner, gpu
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} came past the mode")


class FakeGPU(TorchFunctionMode):
    """The device, and the mode under which its tensors are made. `kernels`: whose twins stand in, "reference" or "c"."""

    def __init__(self, kernels: str = "reference") -> None:
        super().__init__()
        self.kernels = {"reference": reference, "c": native}[kernels]
        self.now = Counts()
        self.steps: list[Counts] = []
        self.pinned: dict[int, Tensor] = {}
        self.under_way: set[int] = set()
        """Pinned memory that a copy may still read."""
        self.tape: list[tuple] | None = None
        self.tapes: list[list[tuple]] = []

    def move(self, network: torch.nn.Module) -> None:
        """Put a network's tensors on the device, in place."""

        def there(x: Tensor | None) -> Any:
            return x if x is None or isinstance(x, Remote) else Remote(x.detach(), self)

        for module in network.modules():
            for tensors in (module._parameters, module._buffers):
                for name, tensor in tensors.items():
                    tensors[name] = there(tensor)
            for name in ("packed", "packed_bias"):
                if hasattr(module, name):
                    setattr(module, name, there(getattr(module, name)))

    # ---- what the host does

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = dict(kwargs or {}), getattr(func, "__name__", "")
        first = args[0] if args else None
        if name == "__get__":
            name = func.__self__.__name__
            if name not in ("data", "T", "mT"):
                return func(*args, **kwargs)
        elif name in ASKED:
            return func(*args, **kwargs)
        device = kwargs.get("device")
        target = _target(args, kwargs) if name == "to" else None if device is None else torch.device(device).type
        if name == "pin_memory" or kwargs.get("pin_memory"):
            assert self.tape is None, "pinned memory while recording"
            self.now.pinned += 1
            made = first.clone() if name == "pin_memory" else func(*args, **{**kwargs, "pin_memory": False})
            self.pinned[made.untyped_storage().data_ptr()] = made
            return made
        remote = any(isinstance(x, Remote) for x in tree_flatten((args, kwargs))[0])
        if isinstance(first, Remote):
            if name == "data_ptr":
                return first.inner.data_ptr()
            if name == "__iter__":
                return iter(first.unbind(0))
            if name in READS or target == "cpu":
                self.wait()
                return getattr(first.inner.clone(), name)(*args[1:], **{} if name == "cpu" else kwargs)
        elif name == "copy_" and remote:
            self.wait()
        elif name == "to" and target == "cuda":
            self.upload(first, bool(kwargs.get("non_blocking")))
            return Remote(first.clone(), self)
        if name == "copy_" and isinstance(first, Remote) and not isinstance(args[1], Remote):
            self.upload(args[1], bool(args[2]) if len(args) > 2 else bool(kwargs.get("non_blocking")))
            first.inner.copy_(args[1])
            return first
        if name in ("tensor", "as_tensor") and target == "cuda":
            self.upload(torch.empty(0), False)
        if remote or target == "cuda":
            return self.operate(func, name, args, kwargs)
        return func(*args, **kwargs)

    def upload(self, x: Tensor, non_blocking: bool) -> None:
        assert self.tape is None, "an upload while recording"
        self.now.uploads += 1
        place = x.untyped_storage().data_ptr()
        if not non_blocking or place not in self.pinned:
            self.wait("blocking upload")
            return
        assert place not in self.under_way, "pinned memory is written and sent again before the device has read it"
        self.under_way.add(place)

    def wait(self, what: str = "read") -> None:
        assert self.tape is None, f"a {what} while recording"
        frames = [f for f in traceback.extract_stack() if "/dlm/" in f.filename and "/tests/" not in f.filename]
        at = f"{frames[-1].filename.split('/dlm/')[-1]}:{frames[-1].lineno} {frames[-1].line}" if frames else "outside"
        self.now.waits.append(f"{what} at {at}")
        self.under_way.clear()

    # ---- what the device does

    def operate(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        """Compute, count, write down while recording, and wrap what comes out."""
        flat, _ = tree_flatten((args, kwargs))
        strangers = [x for x in flat if isinstance(x, Tensor) and not isinstance(x, Remote) and x.dim() > 0]
        assert not strangers or name == "copy_", f"{name} reads a tensor of the host beside the device's"
        counted = name == "repeat_interleave" and isinstance(args[1], int)  # the size is known without the device
        if (name in WAITS and not counted) or (name.startswith(("index", "__getitem", "__setitem")) and _masked(args)):
            self.wait(name)
        given, named = tree_map(_inner, (list(args), kwargs))
        if "device" in named:
            named["device"] = "cpu"
        run = _widely(func) if name in WIDE else func
        with torch._C.DisableTorchFunction():
            out = run(*given, **named)
        mine = {id(x.inner): x for x in flat if isinstance(x, Remote)}
        results = [x for x in tree_flatten(out)[0] if isinstance(x, Tensor)]
        known = {x.untyped_storage().data_ptr() for x in tree_flatten((given, named))[0] if isinstance(x, Tensor)}
        written = out is None or any(id(x) in mine for x in results)
        views = all(x.untyped_storage().data_ptr() in known for x in results)
        if (written or not views) and "empty" not in name:
            self.now.launches += 1
            if self.tape is not None:
                self.tape.append((run, given, named, [] if written else results))
        return tree_map(
            lambda x: mine[id(x)] if id(x) in mine else Remote(x, self) if isinstance(x, Tensor) else x, out
        )

    def kernel(self, name: str) -> Callable[..., Any]:
        """A launch of the kernel of that name."""
        fallback = getattr(reference, name)
        twin = fallback if name in paths.FUSED else getattr(self.kernels, name)

        def run(*args: Any, **kwargs: Any) -> Any:
            args = tuple(replace(x) if isinstance(x, Spans) else x for x in args)  # without what it read before
            try:
                return twin(*args, **kwargs)
            except AssertionError:
                return fallback(*args, **kwargs)

        def launch(*args: Any, **kwargs: Any) -> Any:
            given = [_inner(x) for x in args]
            named = {k: _inner(v) for k, v in kwargs.items()}
            with torch._C.DisableTorchFunction():
                out = run(*given, **named)
            results = list(vars(out).values() if hasattr(out, "first_token") else tree_flatten(out)[0])
            results = [x.clone() if any(x is y for y in given) else x for x in results]
            self.now.launches += LAUNCHES.get(name, 1) + (name == "paged_attention" and args[3].max_visible > CHUNK)
            if self.tape is not None:
                self.tape.append((run, given, named, results))
            wrapped = [Remote(x, self) for x in results]
            if hasattr(out, "first_token"):
                return type(out)(**dict(zip(vars(out), wrapped, strict=True)))
            return tuple(wrapped) if isinstance(out, tuple) else wrapped[0]

        return launch

    def captures(self) -> Callable:
        """Stands in for `dlm.inference.graphs.cuda_graphs`."""

        def capture(run: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
            self.tape = tape = []
            try:
                result = run()
            finally:
                self.tape = None
            self.tapes.append(tape)
            self.now.captures += 1
            return lambda: self.replay(tape), result

        return capture

    def replay(self, tape: list[tuple]) -> None:
        self.now.replays += 1
        with torch._C.DisableTorchFunction():
            for other in self.tapes:  # they share one pool: what they computed is overwritten
                for *_, results in other:
                    for x in results:
                        x.fill_(float("nan") if x.is_floating_point() else x.dtype is torch.bool or 77)
            for func, args, kwargs, results in tape:
                out = func(*args, **kwargs)
                if results:
                    found = vars(out).values() if hasattr(out, "first_token") else tree_flatten(out)[0]
                    for old, new in zip(results, [x for x in found if isinstance(x, Tensor)], strict=True):
                        old.copy_(new)


class Event:
    """Waiting for it costs nothing where the device is ahead, so it is not counted."""

    def __init__(self, gpu: FakeGPU) -> None:
        self.gpu = gpu

    def record(self) -> None: ...

    def synchronize(self) -> None:
        self.gpu.under_way.clear()


@contextmanager
def fake_gpu(monkeypatch: pytest.MonkeyPatch, lm: LM, kernels: str = "reference") -> Iterator[FakeGPU]:
    """The model lies on a GPU while this is entered, and afterwards too: it is of no use to anything else."""
    gpu = FakeGPU(kernels)
    pack(lm.network, launched=True)
    gpu.move(lm.network)
    run = Stepper.run

    def counted(self: Stepper, scheduled: Any) -> Any:
        gpu.now = Counts()
        gpu.steps.append(gpu.now)
        return run(self, scheduled)

    with monkeypatch.context() as patch:
        patch.setattr(Stepper, "run", counted)
        patch.setattr(paths, "_no_triton", lambda device, dtype: None)
        patch.setattr(paths, "_there", lambda name, device, dtype: name == "triton" or device.type == "cpu")
        patch.setitem(
            paths.PATHS,
            "triton",
            replace(paths.PATHS["triton"], missing=lambda d, t: None if d.type == "cuda" else "no"),
        )
        patch.setattr(
            paths.Path, "kernel", lambda self, name: gpu.kernel(name) if self.name == "triton" else _own(self, name)
        )
        patch.setattr(paths.Path, "launching", lambda self, x: nullcontext())
        patch.setattr(compute, "pack", lambda network: None)
        patch.setattr(engine, "pack", lambda network: None)
        patch.setattr(compute, "cuda_graphs", gpu.captures)
        patch.setattr(torch.cuda, "Event", lambda: Event(gpu))
        patch.setattr(memory, "whole_memory", lambda device: 2**40)
        with gpu:
            yield gpu


_kernel = paths.Path.kernel


def _own(path: paths.Path, name: str) -> Any:
    return _kernel(path, name)


def _inner(x: Any) -> Any:
    if isinstance(x, Remote):
        return x.inner
    if isinstance(x, Spans):
        return replace(x, **{name: _inner(y) for name, y in vars(x).items() if isinstance(y, Tensor)})
    return torch.device("cpu") if isinstance(x, torch.device) else x


def _masked(args: Any) -> bool:
    """Whether an index is a mask: how many places it has is not known to the host."""
    return any(isinstance(x, Tensor) and x.dtype == torch.bool for x in tree_flatten(args[1:2])[0])


def _target(args: Any, kwargs: Any) -> str | None:
    """The device that `to` names."""
    for x in (*args[1:], kwargs.get("device")):
        if isinstance(x, torch.device | str) and not isinstance(x, torch.dtype):
            return torch.device(x).type
    return None


def _widely(func: Any) -> Callable[..., Tensor]:
    def wide(*args: Any, **kwargs: Any) -> Tensor:
        kind = args[0].dtype
        return func(*(x.double() if isinstance(x, Tensor) else x for x in args), **kwargs).to(kind)

    return wide
