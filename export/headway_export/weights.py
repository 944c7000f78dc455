"""The files that an export has written weights to, from which it reads them then: so they are in memory once.

A checkpoint is mapped or read, the tracer takes its weights as they are or transposed, and a session lays them out for
its products. Once a graph is written, its module and its graphs can read from that file, and whatever they held before
is let go. Pages of a mapped file are not lost when they are given back: they are read again when they are needed.
"""

from __future__ import annotations

import gc
import hashlib
import mmap
from collections import defaultdict
from collections.abc import Iterable, Mapping
from itertools import chain, islice
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import onnx_ir as ir
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from headway_export.rewriting import copy_graph
from headway_server.runtime import give_back_memory

_MOST_BYTES_WITHIN = 256
"""Weights of no more bytes are always in their graph: naming their place in a file takes about as many."""


def save(model: ir.Model, path: Path, *, threshold_bytes: int, written: Iterable[Path] = ()) -> None:
    """Writes a graph, and its weights to a file beside it if they are large.

    Args:
        model: The graph.
        path: Where to.
        threshold_bytes: Size of all weights from which they go to that file.
        written: Graphs in the same folder. Weights that are in the files beside them, byte for byte, are read from
            there and not written once more.
    """
    places = _places_of_bytes(written)
    model = copy_graph(model)
    rest: list[ir.Value] = []
    for value in model.graph.initializers.values():
        weight = value.const_value
        assert weight is not None, "the tracer gives weights their values"
        if weight.nbytes <= _MOST_BYTES_WITHIN:
            continue
        if places and (there := places.get(_digest(weight))) is not None:
            value.const_value = _in_file(there, weight)
        else:
            rest.append(value)
    tensors = [value.const_value for value in rest if value.const_value is not None]
    if tensors and sum(tensor.nbytes for tensor in tensors) >= threshold_bytes:
        external = ir.external_data.convert_tensors_to_external(
            tensors, path.parent, _beside(path).name, alignment=mmap.PAGESIZE
        )
        for value, tensor in zip(rest, external, strict=True):
            value.const_value = tensor
    ir.save(model, path)


def _places_of_bytes(written: Iterable[Path]) -> dict[bytes, ir.ExternalTensor]:
    """Returns the weights in files beside graphs by their digests."""
    weights = (value.const_value for path in written for value in ir.load(path).graph.initializers.values())
    return {_digest(weight): weight for weight in weights if isinstance(weight, ir.ExternalTensor)}


def _digest(weight: ir.TensorProtocol) -> bytes:
    return hashlib.sha256(weight.tobytes()).digest()


def _in_file(there: ir.ExternalTensor, weight: ir.TensorProtocol) -> ir.ExternalTensor:
    """Returns a weight that is read where another is, of which it may differ in shape and type."""
    return ir.ExternalTensor(
        there.location,
        there.offset,
        there.length,
        weight.dtype,
        shape=ir.Shape(weight.shape.numpy()),
        name=weight.name or "",
        base_dir=there.base_dir,
    )


def _beside(path: Path) -> Path:
    return path.with_name(f"{path.name}.data")


class WrittenWeights:
    """Weights that are read from the files of graphs."""

    def __init__(self) -> None:
        self._files: list[mmap.mmap] = []
        self._arrays: defaultdict[tuple[int, ...], list[NDArray[Any]]] = defaultdict(list)  # by their shapes

    def __repr__(self) -> str:
        return f"WrittenWeights({', '.join(f'{len(file)} bytes' for file in self._files) or 'none'})"

    def read_from(self, written: Mapping[Path, ir.Model], module: nn.Module, graphs: Iterable[ir.Model]) -> None:
        """Lets a module and its graphs read their weights from the files that these were saved to.

        A weight that the files do not have is copied, so that nothing of a checkpoint is held any longer.

        Args:
            written: All graphs that were saved, by their paths.
            module: What they were traced from.
            graphs: The graphs as they were traced, whose weights are the same.
        """
        if not any(_beside(path).is_file() for path in written):
            return
        files: dict[str, mmap.mmap] = {}
        for path in written:
            if _beside(path).is_file():
                with _beside(path).open("rb") as stream:  # torch takes no memory that it could not write to
                    files[_beside(path).name] = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY)
        self._files += files.values()
        places: _Places = {}
        for path, model in written.items():
            places |= _places_of(files, ir.load(path), model)
        for array in places.values():
            self._arrays[array.shape].append(array)
        for value in (value for graph in graphs for value in graph.graph.initializers.values()):
            assert value.const_value is not None, "the tracer gives weights their values"
            array = value.const_value.numpy()
            there = places.get(_place_in_memory(array))
            value.const_value = ir.tensor(array.copy() if there is None else there, name=value.name)
        for tensor in (*module.parameters(), *module.buffers()):
            tensor.data = _moved(tensor.data, places)

    def share_with(self, module: nn.Module) -> None:
        """Lets another module read those of its weights from the files that are there, number for number."""
        for tensor in (*module.parameters(), *module.buffers()):
            if tensor.nbytes <= _MOST_BYTES_WITHIN or tensor.dtype is torch.bfloat16:
                continue
            held = tensor.data.numpy()
            same = (there for there in self._arrays[held.shape] if _is_same(there, held))
            transposed = (there.T for there in self._arrays[held.T.shape] if _is_same(there, held.T))
            for shared in islice(chain(same, transposed), 1):
                tensor.data = torch.from_numpy(shared)

    def give_back(self) -> None:
        """Gives back what nobody needs now: garbage, and pages of the files, which are read again where they are."""
        gc.collect()
        give_back_memory()
        if hasattr(mmap, "MADV_DONTNEED"):
            for file in self._files:
                file.madvise(mmap.MADV_DONTNEED)


def _is_same(there: NDArray[Any], held: NDArray[Any]) -> bool:
    return there.dtype == held.dtype and np.array_equal(there[:1], held[:1]) and np.array_equal(there, held)


_Places: TypeAlias = dict[tuple[int, tuple[int, ...], tuple[int, ...]], NDArray[Any]]
"""The same weight in a file, by where it is held in memory."""


def _place_in_memory(array: NDArray[Any]) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    return array.ctypes.data, array.shape, array.strides


def _places_of(files: Mapping[str, mmap.mmap], saved: ir.Model, model: ir.Model) -> _Places:
    """Finds the weights of a graph in the files that they were saved to.

    What is not the same there stays where it is, so that a module is never held against what was saved wrongly.
    """
    places: _Places = {}
    for name, value in saved.graph.initializers.items():
        place, weight = value.const_value, model.graph.initializers[name].const_value
        if not isinstance(place, ir.ExternalTensor) or weight is None:
            continue
        held = weight.numpy()
        there = np.frombuffer(files[str(place.location)], held.dtype, held.size, place.offset or 0).reshape(held.shape)
        if np.array_equal(there, held):
            places[_place_in_memory(held)] = there
    return places


def _moved(tensor: Tensor, places: _Places) -> Tensor:
    """Returns a tensor in a file, where it may lie transposed, or else a copy of it."""
    if tensor.dtype is not torch.bfloat16:  # which NumPy does not have
        held = tensor.numpy()
        if (there := places.get(_place_in_memory(held))) is not None:
            return torch.from_numpy(there)
        if (there := places.get(_place_in_memory(held.T))) is not None:
            return torch.from_numpy(there.T)
    return tensor.clone()
