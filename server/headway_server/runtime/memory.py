"""Buffers of a decoder's state on its device, addressed by slot.

A slot is a row of the first axis, so that neighbouring slots are one block of memory, to which a graph can be bound
without a copy.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterable
from typing import Any, Protocol, Self

import numpy as np

from headway_server.errors import ModelRunError
from headway_server.runtime.machine import Device, load_cudart
from headway_server.runtime.session import Tensor

_CUDA_MEMCPY_HOST_TO_DEVICE = 1
_CUDA_MEMCPY_DEVICE_TO_DEVICE = 3


class StateBuffer(Protocol):
    """State of all slots: (slots, heads, cache_length, head_dim), or (slots, ...) for state without positions."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    num_bytes: int

    def address(self, slot: int) -> int:
        """Returns the memory address of a slot's state."""

    def copy(self, source: Self, start: tuple[int, int], target: tuple[int, int], length: int) -> None:
        """Copies `length` positions of a buffer, from (slot, position) `start` on, to those from `target` on.

        The two buffers differ in slots and positions alone; they may be one, if the two slots differ.
        """

    def reorder(self, copies: Iterable[tuple[int, int, int, int]]) -> None:
        """Copies positions of slots to the same positions of other slots; no slot is both source and target.

        Each copy is (source, target, start, stop): two slots, and the positions from `start` to before `stop`.
        """

    def copy_slots(self, source: Self, first: int, target: int, count: int) -> None:
        """Copies `count` slots of a buffer of this kind and of such slots, from `first` on, to those from `target` on.

        `source` may be this buffer; the two ranges must then be equal or apart.
        """

    def fill(self, slot: int, values: Tensor | None) -> None:
        """Writes a whole slot: values of its shape, in main memory, or zeros."""


def allocate(device: Device, shape: tuple[int, ...], dtype: str) -> StateBuffer:
    """Allocates a buffer of zeros, all of it at once.

    Args:
        device: Where the graph runs that will be bound to it.
        shape: (slots, heads, cache_length, head_dim), or (slots, ...) for state without positions.
        dtype: NumPy's name of it.
    """
    return HostBuffer(shape, dtype) if device == "cpu" else CudaBuffer(shape, dtype)


class HostBuffer:
    """State in main memory."""

    def __init__(self, shape: tuple[int, ...], dtype: str) -> None:
        self._array: Tensor = np.empty(shape, dtype)
        self._array.fill(0)  # unlike np.zeros, this takes the memory now, and not under load
        self.shape = shape
        self.dtype = self._array.dtype
        self.num_bytes = self._array.nbytes

    def __repr__(self) -> str:
        return f"HostBuffer({self.shape}, {self.dtype}, {self.num_bytes} bytes)"

    def address(self, slot: int) -> int:
        """Returns the memory address of a slot's state."""
        return int(self._array.ctypes.data) + slot * self._array.strides[0]

    def copy(self, source: Self, start: tuple[int, int], target: tuple[int, int], length: int) -> None:
        """Copies `length` positions of a buffer, from (slot, position) `start` on, to those from `target` on."""
        (from_slot, first), (to_slot, to_first) = start, target
        self._array[to_slot, :, to_first : to_first + length] = source._array[from_slot, :, first : first + length]

    def reorder(self, copies: Iterable[tuple[int, int, int, int]]) -> None:
        """Copies positions of slots to other slots: (source, target, start, stop)."""
        array = self._array
        for source, target, start, stop in copies:
            array[target, :, start:stop] = array[source, :, start:stop]

    def copy_slots(self, source: Self, first: int, target: int, count: int) -> None:
        """Copies `count` whole slots of a buffer, from `first` on, to those from `target` on."""
        self._array[target : target + count] = source._array[first : first + count]

    def fill(self, slot: int, values: Tensor | None) -> None:
        """Writes a whole slot: values of its shape, or zeros."""
        self._array[slot] = 0 if values is None else values


class CudaBuffer:
    """State in the memory of the first CUDA device."""

    def __init__(self, shape: tuple[int, ...], dtype: str) -> None:
        import onnxruntime  # noqa: PLC0415 (an extra of this distribution)

        self.shape = shape
        self.dtype = np.dtype(dtype)
        self.num_bytes = math.prod(shape) * self.dtype.itemsize
        self._value = onnxruntime.OrtValue.ortvalue_from_shape_and_type(list(shape), self.dtype, "cuda", 0)
        self._address = int(self._value.data_ptr())
        self._cudart = load_cudart()
        self._check(self._cudart.cudaMemset(ctypes.c_void_p(self._address), 0, ctypes.c_size_t(self.num_bytes)))

    def __repr__(self) -> str:
        return f"CudaBuffer({self.shape}, {self.dtype}, {self.num_bytes} bytes)"

    def address(self, slot: int) -> int:
        """Returns the device address of a slot's state."""
        return self._address + slot * self._bytes(self.shape[1:])

    def copy(self, source: Self, start: tuple[int, int], target: tuple[int, int], length: int) -> None:
        """Copies `length` positions of a buffer, from (slot, position) `start` on, to those from `target` on.

        ONNX Runtime uses a stream of its own, so the copy waits for the device before and after.
        """
        self._check(self._cudart.cudaDeviceSynchronize())
        self._enqueue_copy(source, start, target, length)
        self._check(self._cudart.cudaDeviceSynchronize())

    def reorder(self, copies: Iterable[tuple[int, int, int, int]]) -> None:
        """Copies positions of slots to other slots, (source, target, start, stop); waits for the device once."""
        self._check(self._cudart.cudaDeviceSynchronize())
        for source, target, start, stop in copies:
            self._enqueue_copy(self, (source, start), (target, start), stop - start)
        self._check(self._cudart.cudaDeviceSynchronize())

    def _enqueue_copy(self, source: Self, start: tuple[int, int], target: tuple[int, int], length: int) -> None:
        """Begins a copy; all heads are one strided copy."""
        _, heads, _, _ = self.shape
        to_pitch, from_pitch = (ctypes.c_size_t(self._bytes(buffer.shape[2:])) for buffer in (self, source))
        width = ctypes.c_size_t(length * self._bytes(self.shape[3:]))
        to, first = ctypes.c_void_p(self._position(*target)), ctypes.c_void_p(source._position(*start))
        kind = _CUDA_MEMCPY_DEVICE_TO_DEVICE
        self._check(self._cudart.cudaMemcpy2D(to, to_pitch, first, from_pitch, width, heads, kind))

    def copy_slots(self, source: Self, first: int, target: int, count: int) -> None:
        """Copies `count` whole slots of a buffer, from `first` on, to those from `target` on."""
        size = count * self._bytes(self.shape[1:])
        self._copy_bytes(self.address(target), source.address(first), size, _CUDA_MEMCPY_DEVICE_TO_DEVICE)

    def fill(self, slot: int, values: Tensor | None) -> None:
        """Writes a whole slot: values of its shape, in main memory, or zeros."""
        array = np.zeros(self.shape[1:], self.dtype) if values is None else np.ascontiguousarray(values, self.dtype)
        assert array.shape == self.shape[1:], "graphs are checked against the manifest"
        self._copy_bytes(self.address(slot), array.ctypes.data, array.nbytes, _CUDA_MEMCPY_HOST_TO_DEVICE)

    def _copy_bytes(self, to: int, start: int, num_bytes: int, kind: int) -> None:
        """Copies memory; waits for the device before and after, as `copy` does."""
        arguments = (ctypes.c_void_p(to), ctypes.c_void_p(start), ctypes.c_size_t(num_bytes))
        self._check(self._cudart.cudaDeviceSynchronize())
        self._check(self._cudart.cudaMemcpy(*arguments, kind))
        self._check(self._cudart.cudaDeviceSynchronize())

    def _position(self, slot: int, position: int) -> int:
        return self.address(slot) + position * self._bytes(self.shape[3:])

    def _bytes(self, shape: tuple[int, ...]) -> int:
        return math.prod(shape) * self.dtype.itemsize

    def _check(self, code: int) -> None:
        if code != 0:
            raise ModelRunError(f"a CUDA call failed with code {code}; see the CUDA runtime's table of errors")
