"""Encodes and decodes columns of integers: bit-packed, in whole bytes, or as byte planes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from jaxtyping import Int32
    from numpy import ndarray

PACKED_LIMIT = 2**16  # values; unpacking takes a byte a bit

POWERS = 2 ** np.arange(7, -1, -1, dtype=np.uint8)


class Broken(Exception):
    """The bytes were not written by `Writer`."""


class Writer:
    """Collects the parts of a record's content. `whole` writes tokens in whole bytes, in which a dictionary finds
    words; `planes` writes other columns as byte planes, in which zstd finds long runs. Otherwise columns are
    bit-packed, which is smallest for short canvases.
    """

    def __init__(self, whole: bool, planes: bool) -> None:
        self.whole, self.planes = whole, planes
        self.parts: list[bytes] = []

    def number(self, value: int) -> None:
        """A natural number, seven bits a byte."""
        while value > 127:
            self.parts.append(bytes((value & 127 | 128,)))
            value >>= 7
        self.parts.append(bytes((value,)))

    def signed(self, value: int) -> None:
        self.number(2 * value if value >= 0 else -2 * value - 1)

    def bytes(self, data: bytes) -> None:
        self.number(len(data))
        self.parts.append(data)

    def column(self, values: Int32[ndarray, " n"]) -> None:
        """Values of at least 0, in as few bits (or, as planes, bytes) as the largest needs."""
        width = _width(values)
        if self.planes:
            width = -(-width // 8)
            data = np.ascontiguousarray(values, "<u4").view(np.uint8).reshape(-1, 4).T[:width].tobytes()
        else:
            data = _packed(values, width)
        self.parts += (bytes((width,)), data)

    def tokens(self, values: Int32[ndarray, " n"]) -> None:
        """Token ids; where some are negative, their differences from the smallest."""
        low = min(0, int(values.min())) if len(values) else 0
        values = values - np.int64(low) if low else values
        self.signed(low)
        width = _width(values)
        if self.whole:
            width = next(size for size in (0, 1, 2, 4) if 8 * size >= width)
            data = values.astype(f"<u{width}").tobytes() if width else b""
        else:
            data = _packed(values, width)
        self.parts += (bytes((width,)), data)

    def halves(self, values: ndarray) -> None:
        """fp16 numbers as two byte planes."""
        self.parts.append(np.ascontiguousarray(values, "<f2").view(np.uint8).reshape(-1, 2).T.tobytes())


class Reader:
    """Reads what `Writer` wrote. Never reads past the end, whatever the bytes are: raises Broken instead."""

    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0
        self.whole = self.planes = False

    def number(self, limit: int = 2**31 - 1) -> int:
        value = shift = 0
        while (byte := self.data[self.at]) > 127:  # IndexError beyond the bytes
            self.at, value, shift = self.at + 1, value | (byte & 127) << shift, shift + 7
            if shift > 35:
                raise Broken("a number without end")
        self.at, value = self.at + 1, value | byte << shift
        if value > limit:
            raise Broken(f"a count of {value} is over {limit}")
        return value

    def signed(self) -> int:
        value = self.number()
        return -(value + 1) // 2 if value % 2 else value // 2

    def take(self, size: int) -> bytes:
        """The next `size` bytes."""
        start, self.at = self.at, self.at + size
        if self.at > len(self.data):
            raise Broken("it ends too early")
        return self.data[start : self.at]

    def bytes(self) -> bytes:
        return self.take(self.number())

    def column(self, n: int) -> Int32[ndarray, " n"]:
        width = self.number(4 if self.planes else 32)
        if width == 0 or n == 0:
            return np.zeros(n, np.int32)
        if not self.planes:
            return self._unpacked(n, width)
        planes = np.frombuffer(self.take(n * width), np.uint8).reshape(width, n)
        full = np.zeros((n, 4), np.uint8)
        full[:, :width] = planes.T
        return full.view("<i4")[:, 0]

    def tokens(self, n: int) -> Int32[ndarray, " n"]:
        low, width = self.signed(), self.number(4 if self.whole else 32)
        if width == 0 or n == 0:
            tokens = np.zeros(n, np.int32)
        elif self.whole:
            if width == 3:
                raise Broken("tokens of width 3")
            tokens = np.frombuffer(self.take(n * width), f"<u{width}").astype(np.int32)
        else:
            tokens = self._unpacked(n, width)
        return tokens + np.int32(low) if low else tokens

    def halves(self, n: int) -> ndarray:
        planes = np.frombuffer(self.take(2 * n), np.uint8).reshape(2, n)
        return np.ascontiguousarray(planes.T).view("<f2")[:, 0]

    def end(self) -> None:
        if self.at != len(self.data):
            raise Broken(f"{len(self.data) - self.at} bytes too many")

    def _unpacked(self, n: int, width: int) -> Int32[ndarray, " n"]:
        if n > PACKED_LIMIT:
            raise Broken(f"{n} packed values")
        bits = np.unpackbits(np.frombuffer(self.take((n * width + 7) // 8), np.uint8), count=n * width)
        if width <= 8:
            return (bits.reshape(n, width) @ POWERS[8 - width :]).astype(np.int32)
        size = 16 if width <= 16 else 32
        full = np.zeros((n, size), np.uint8)
        full[:, size - width :] = bits.reshape(n, width)
        return np.packbits(full).view(f">u{size // 8}").astype(np.int32)


def _width(values: Int32[ndarray, " n"]) -> int:
    return int(values.max()).bit_length() if len(values) else 0


def _packed(values: Int32[ndarray, " n"], width: int) -> bytes:
    bits = np.unpackbits(values.astype(">u4").view(np.uint8)).reshape(-1, 32)[:, 32 - width :]
    return np.packbits(bits).tobytes()
