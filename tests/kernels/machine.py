"""The kernels on a processor that is not there: compiled for it, run by an emulator, called as ctypes calls a library.

A call takes along every tensor that its addresses lead into, structs included, and brings back what was written.
"""

import ctypes
import gc
import struct
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from dlm.kernels.c import binding

MANY, FLOATS = 24, (ctypes.c_float,)


class Machine:
    """Stands in for the `ctypes.CDLL` of the kernels."""

    def __init__(self, command: list[str]) -> None:
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("dlm_"):
            raise AttributeError(name)
        return lambda *arguments: self._call(name, arguments)

    def _call(self, name: str, arguments: tuple[Any, ...]) -> int:
        whole, real, pieces = [], 0.0, {}
        storages = _storages()
        for kind, given in zip(binding.SIGNATURES[name], arguments, strict=True):
            if kind in FLOATS:
                real = float(given)
            elif isinstance(given, int):
                whole.append(given)
                if kind is ctypes.c_void_p:
                    _follow(given, storages, pieces)
            elif given is None:
                whole.append(0)
            else:  # a struct, an array of them, or a reference to one
                held = getattr(given, "_obj", given)
                start, size = ctypes.addressof(held), ctypes.sizeof(held)
                whole.append(start)
                pieces[start] = size
                for (word,) in struct.iter_unpack("<Q", ctypes.string_at(start, size // 8 * 8)):
                    _follow(word, storages, pieces)
        data = [name.encode().ljust(64, b"\0"), struct.pack("<q", len(pieces))]
        data += [struct.pack("<qq", *piece) for piece in pieces.items()]
        data += [ctypes.string_at(*piece) for piece in pieces.items()]
        data += [struct.pack(f"<{MANY}qf", *(whole + [0] * (MANY - len(whole))), real)]
        assert self.process.stdin is not None
        self.process.stdin.write(b"".join(data))
        self.process.stdin.flush()
        (result,) = struct.unpack("<q", self._read(8))
        for start, size in pieces.items():
            ctypes.memmove(start, self._read(size), size)
        return ctypes.c_int32(result).value if binding.RESULTS.get(name) is ctypes.c_int else result

    def _read(self, size: int) -> bytes:
        assert self.process.stdout is not None
        found = self.process.stdout.read(size)
        assert len(found) == size, f"the machine ended with status {self.process.wait()}"
        return found


def _storages() -> list[tuple[int, int]]:
    """Address and size of the memory of every tensor there is."""
    tensors = [x for x in gc.get_objects() if issubclass(type(x), torch.Tensor) and x.device.type == "cpu"]
    found = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors if x.layout == torch.strided}
    return [(start, size) for start, size in found.items() if start and size]


def _follow(address: int, storages: list[tuple[int, int]], pieces: dict[int, int]) -> None:
    pieces.update((start, size) for start, size in storages if start <= address < start + size)


@contextmanager
def running(compiler: str, emulator: list[str], folder: Path, flags: list[str]) -> Iterator[Machine]:
    """The kernels and machine.c compiled into `folder`, and run."""
    sources = [str(path) for path in binding.SOURCES if path.suffix == ".c"]
    program = folder / "machine"
    own = str(Path(__file__).with_name("machine.c"))
    command = [compiler, "-std=gnu11", "-O2", *flags, "-rdynamic", *sources, own, "-o", str(program), "-lm", "-ldl"]
    subprocess.run(command, check=True)
    machine = Machine([*emulator, str(program)])
    try:
        yield machine
    finally:
        machine.process.kill()
        machine.process.wait()
        for pipe in (machine.process.stdin, machine.process.stdout):
            assert pipe is not None
            pipe.close()
