"""The files that an export reads weights from: so they are in memory once, and on disk as often as they must be.

A checkpoint is mapped or read, the tracer takes its weights as they are or transposed, and a session lays them out for
its products. Once a graph is written, its module and its graphs can read from that file, and whatever they held before
is let go. Pages of a mapped file are not lost when they are given back: they are read again when they are needed.

A graph that only judges others need not have its weights written at all: it reads those of the checkpoint where they
lie, if they are there in fp32, in their files of safetensors.
"""

from __future__ import annotations

import gc
import hashlib
import json
import math
import mmap
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import onnx_ir as ir
import torch
from numpy.typing import NDArray
from onnx_ir.tape import Tape
from torch import Tensor, nn

from headway_export.rewriting import copy_graph
from headway_server.runtime import give_back_memory

_SUFFIX = ".onnx.data"
"""Of files of weights, which whoever opens a graph looks for in its folder."""
_MOST_BYTES_WITHIN = 256
"""Weights of no more bytes are always in their graph: naming their place in a file takes about as many."""


def save(
    model: ir.Model,
    path: Path,
    *,
    threshold_bytes: int,
    written: Iterable[Path] = (),
    checkpoint: CheckpointFiles | None = None,
) -> None:
    """Writes a graph, and its weights to a file beside it if they are large.

    Args:
        model: The graph.
        path: Where to.
        threshold_bytes: Size of all weights from which they go to that file.
        written: Graphs in the same folder. Weights that are in the files beside them, byte for byte, are read from
            there and not written once more.
        checkpoint: Files that those of its weights which lie in them are read from, whose numbers they are then.
    """
    places = _places_of_bytes(written)
    model = copy_graph(model)
    rest: list[ir.Value] = []
    for value in list(model.graph.initializers.values()):
        weight = value.const_value
        assert weight is not None, "the tracer gives weights their values"
        if weight.nbytes <= _MOST_BYTES_WITHIN:
            continue
        if checkpoint is not None and checkpoint.place(model.graph, value, path.parent):
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
    return path.with_name(path.stem + _SUFFIX)


class CheckpointFiles:
    """Files of safetensors with weights in fp32, mapped, which do not change as long as this is used."""

    def __init__(self, files: Sequence[Path]) -> None:
        """Maps them."""
        self.maps: list[mmap.mmap] = []
        self.arrays: list[NDArray[np.float32]] = []
        """The weights of all files."""
        self._paths: list[Path] = []
        self._places: dict[_Place, tuple[int, int]] = {}  # file, and offset in it
        for path in files:
            mapped = _mapped(path)
            start = 8 + int.from_bytes(mapped[:8], "little")
            entries = json.loads(mapped[8:start])
            for entry in (entry for name, entry in entries.items() if name != "__metadata__"):
                if entry["dtype"] != "F32" or (count := math.prod(entry["shape"])) == 0:
                    continue
                offset = start + entry["data_offsets"][0]
                array = np.frombuffer(mapped, np.float32, count, offset).reshape(entry["shape"])
                self.arrays.append(array)
                self._places[_place_in_memory(array)] = len(self.maps), offset
            self.maps.append(mapped)
            self._paths.append(path.resolve())

    def __repr__(self) -> str:
        return f"CheckpointFiles({len(self.maps)} files, {len(self.arrays)} weights)"

    def holds(self, array: NDArray[Any]) -> bool:
        """True if an array lies in one of the files, as it is there or transposed."""
        return any(_place_in_memory(one) in self._places for one in (array, array.T))

    def place(self, graph: ir.Graph, value: ir.Value, folder: Path) -> bool:
        """Lets an initializer be read from where it lies, transposed if it is not as it is there.

        Args:
            graph: The graph, which is saved to a folder.
            value: One of its initializers.
            folder: That folder, which gets a link to the file.

        Returns:
            False if the initializer lies in none of the files.
        """
        assert value.const_value is not None, "the tracer gives weights their values"
        array = value.const_value.numpy()
        is_transposed = _place_in_memory(array) not in self._places
        there = array.T if is_transposed else array
        if (found := self._places.get(_place_in_memory(there))) is None:
            return False
        number, offset = found
        link = folder / f"checkpoint-{number}{_SUFFIX}"
        if not link.is_symlink():
            link.symlink_to(self._paths[number])
        weight = ir.ExternalTensor(
            link.name, offset, there.nbytes, ir.DataType.FLOAT, shape=ir.Shape(there.shape), name=value.name or ""
        )
        if not is_transposed:
            value.const_value = weight
            return True
        tape = Tape()
        weight.name = f"{value.name}.as_stored"
        stored = ir.Value(name=weight.name, const_value=weight, shape=weight.shape, type=ir.TensorType(weight.dtype))
        graph.register_initializer(stored)
        turned = tape.op("Transpose", [stored], {"perm": list(reversed(range(array.ndim)))})
        value.replace_all_uses_with(turned)
        graph.insert_before(graph[0], tape.nodes)
        graph.initializers.pop(str(value.name))
        turned.name = value.name  # which nothing else is called by, within branches too
        return True


class WrittenWeights:
    """Weights that are read from the files of graphs, or of a checkpoint."""

    def __init__(self) -> None:
        self._files: list[mmap.mmap] = []
        self._checkpoint: CheckpointFiles | None = None
        self._arrays: defaultdict[tuple[int, ...], list[NDArray[Any]]] = defaultdict(list)  # by their shapes

    def __repr__(self) -> str:
        return f"WrittenWeights({', '.join(f'{len(file)} bytes' for file in self._files) or 'none'})"

    def begin_with(self, checkpoint: CheckpointFiles, module: nn.Module) -> None:
        """Lets a module, before it is traced, read those of its weights from a checkpoint that are there."""
        self._checkpoint = checkpoint
        self._files += checkpoint.maps
        for array in checkpoint.arrays:
            self._arrays[array.shape].append(array)
        self.share_with(module)

    def read_from(self, written: Mapping[Path, ir.Model], module: nn.Module, graphs: Iterable[ir.Model]) -> None:
        """Lets a module and its graphs read their weights from the files that these were saved to.

        A weight that the files do not have is copied, so that nothing of a checkpoint is held any longer, unless it
        lies in the files that this has begun with.

        Args:
            written: All graphs that were saved, by their paths.
            module: What they were traced from.
            graphs: The graphs as they were traced, whose weights are the same.
        """
        if self._checkpoint is None and not any(_beside(path).is_file() for path in written):
            return
        files: dict[str, mmap.mmap] = {}
        for path in written:
            if _beside(path).is_file():
                files[_beside(path).name] = _mapped(_beside(path))
        self._files += files.values()
        places: _Places = {}
        for path, model in written.items():
            places |= _places_of(files, ir.load(path), model)
        for array in places.values():
            self._arrays[array.shape].append(array)
        for value in (value for graph in graphs for value in graph.graph.initializers.values()):
            assert value.const_value is not None, "the tracer gives weights their values"
            array = value.const_value.numpy()
            if not self._holds(array):
                there = places.get(_place_in_memory(array))
                value.const_value = ir.tensor(array.copy() if there is None else there, name=value.name)
        for tensor in (*module.parameters(), *module.buffers()):
            if tensor.dtype is torch.bfloat16 or not self._holds(tensor.data.numpy()):  # the former NumPy does not have
                tensor.data = _moved(tensor.data, places)

    def _holds(self, array: NDArray[Any]) -> bool:
        return self._checkpoint is not None and self._checkpoint.holds(array)

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


_Place: TypeAlias = tuple[int, tuple[int, ...], tuple[int, ...]]
_Places: TypeAlias = dict[_Place, NDArray[Any]]
"""The same weight in a file, by where it is held in memory."""


def _mapped(path: Path) -> mmap.mmap:
    with path.open("rb") as stream:  # torch takes no memory that it could not write to
        return mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY)


def _place_in_memory(array: NDArray[Any]) -> _Place:
    return array.ctypes.data, array.shape, array.strides


def _places_of(files: Mapping[str, mmap.mmap], saved: ir.Model, model: ir.Model) -> _Places:
    """Finds the weights of a graph in the files that they were saved to.

    What is not the same there stays where it is, so that a module is never held against what was saved wrongly.
    """
    places: _Places = {}
    for name, value in saved.graph.initializers.items():
        place, held_by = value.const_value, model.graph.initializers.get(name)
        weight = None if held_by is None else held_by.const_value
        if not isinstance(place, ir.ExternalTensor) or str(place.location) not in files or weight is None:
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
