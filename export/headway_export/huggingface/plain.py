"""A folder as it is published, as a plain one: the same files, and weights in fp32.

Weights that are quantized, of a GGUF file, or of an adapter and its base become a folder that `transformers` reads by
itself, beside the store. They are read, widened and written one after another, and mapped from there: so no more of
them is in memory than what is computed with.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from headway_export.errors import SourceError
from headway_export.huggingface.adapters import CONFIG_FILE as ADAPTER_FILE
from headway_export.huggingface.adapters import Adapter, widened
from headway_export.huggingface.experts import stack_experts
from headway_export.huggingface.published import (
    FLOAT8,
    QUANTIZATIONS,
    Codes,
    Plain,
    Weight,
    plain_weights,
    quantization_of,
    stored_tensors,
)
from headway_export.rewriting import Blocks, digest_of
from headway_export.space import FLOAT_BYTES, bundle_bytes, free_on_disk
from headway_export.spool import save_tensors
from headway_server.bundles import Precision, make_held
from headway_training.folders import CONFIG_FILE, count_weights

_SHARD_BYTES: Final = 1 << 28
"""Of weights that are written together; that many are in memory."""
_LARGE_BYTES: Final = 1 << 28
"""Of weights in fp32 from which those that came in 16 bits are widened on disk and not in memory."""
_BLOCKS_FOLDER: Final = "blocks"
_LEFT_OUT: Final = (
    "*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json", "*.gguf", CONFIG_FILE, ADAPTER_FILE
)  # fmt: skip
"""What a plain folder has of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainFolder:
    """A temporary folder, which is there as long as this object."""

    path: Path
    kept: Mapping[bytes, Callable[[], Blocks]] = field(default_factory=dict)
    """Reads the blocks of a weight that was published in 4 bits, by `digest_of`."""
    holder: object = None
    """Removes the folder when it goes."""


class _Holder:
    """Removes a folder with itself, or when the program ends."""

    def __init__(self, path: Path) -> None:
        self._remove = weakref.finalize(self, shutil.rmtree, path, ignore_errors=True)


def temporary_folder(name: str, scratch: Path | None) -> PlainFolder:
    """Makes an empty folder.

    Args:
        name: What it is called.
        scratch: Where to make it; None: where the system has temporary files.
    """
    if scratch is not None:
        make_held(scratch)
    root = Path(tempfile.mkdtemp(prefix=".plain-", dir=scratch))
    holder = _Holder(root)
    path = root / name
    path.mkdir()
    return PlainFolder(path=path, holder=holder)


def is_worth_mapping(
    weights: Path, scratch: Path | None, precisions: Collection[Precision], *, has_experts: bool = False
) -> bool:
    """True if a folder's weights are many, are held otherwise than they came, and there is disk to write them on.

    Without fp32 in the bundle it takes no more disk than to write them for an fp32 that judges.
    """
    files = list(weights.glob("model*.safetensors"))
    stored = sum(file.stat().st_size for file in files)
    num_weights = count_weights(weights) if files else 0
    if FLOAT_BYTES * num_weights < (_LARGE_BYTES if has_experts else max(_LARGE_BYTES, 1.01 * stored)):
        return False
    needed = widened_bytes(num_weights, precisions, has_experts=has_experts)
    has_room = free_on_disk(scratch_or_default(scratch)) > needed
    return has_room or Precision.FP32 not in precisions


def widened_bytes(num_weights: int, precisions: Collection[Precision], *, has_experts: bool = False) -> int:
    """Returns about how many bytes of disk it takes to widen weights there and to make a bundle of them.

    An fp32 that is not kept reads them where they are. Of experts, gates and ups are written once more, two matrices of
    three, as their operator reads them.
    """
    num_written = num_weights * 5 // 3 if has_experts else num_weights
    return FLOAT_BYTES * num_written + bundle_bytes(num_weights, precisions, writes_judge=False)


def scratch_or_default(scratch: Path | None) -> Path:
    """Returns the folder that temporary ones are made in."""
    return Path(tempfile.gettempdir()) if scratch is None else scratch


def make_plain(
    given: Path,
    weights: Path,
    files: Sequence[Path],
    content: Mapping[str, Any],
    *,
    config: Any,
    adapter: Adapter | None,
    scratch: Path | None,
) -> tuple[PlainFolder, Mapping[str, Any]]:
    """Makes a plain folder of one whose weights are quantized, or into which an adapter is merged.

    Args:
        given: The folder.
        weights: The folder of the model's weights: `given`, or one below it.
        files: The files of its weights, safetensors.
        content: Its `config.json`.
        config: The same as `transformers` parses it.
        adapter: What is merged into the weights.
        scratch: Where to make it; None: where the system has temporary files.

    Returns:
        The folder, and its `config.json`.
    """
    plain = plain_weights(stored_tensors(files), quantization_of(content))
    content = {name: value for name, value in content.items() if name not in QUANTIZATIONS}
    if adapter is not None:
        plain, changed = adapter.merged(plain)
        content |= changed

    made = temporary_folder(given.resolve().name, scratch)
    if adapter is not None:  # its tokenizer may have more tokens
        mirror(made.path, adapter.path, adapter.path)
    folder = mirror(made.path, given, weights)
    (folder / CONFIG_FILE).write_text(json.dumps(content), encoding="utf-8")
    kept = write_weights(folder, stack_experts(plain, config))
    return replace(made, kept=kept), content


def mirror(path: Path, given: Path, weights: Path) -> Path:
    """Links the files of a folder into another, but for weights and configuration of the model.

    Args:
        path: The folder that is filled.
        given: The folder whose files are linked.
        weights: The folder of the model's weights: `given`, or one below it.

    Returns:
        The counterpart of `weights`, which is a folder of its own.
    """
    within = weights.relative_to(given)
    for folder, made in {given: path, weights: path / within}.items():
        made.mkdir(parents=True, exist_ok=True)
        left_out = {file for pattern in _LEFT_OUT for file in weights.glob(pattern)} | {*weights.parents, weights}
        for entry in folder.iterdir():
            if entry not in left_out and not (made / entry.name).exists():
                (made / entry.name).symlink_to(entry.resolve())
    return path / within


def write_weights(folder: Path, plain: Plain) -> Mapping[bytes, Callable[[], Blocks]]:
    """Writes weights, in fp32, and beside them the blocks of those that were published in 4 bits.

    Args:
        folder: Where to.
        plain: Weights by name.

    Returns:
        What reads the blocks of a weight, by its digest.

    Raises:
        SourceError: The disk is full.
    """
    kept: dict[bytes, Callable[[], Blocks]] = {}

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for name, read in plain.items():
            weight = read()
            _check_widened(folder, name, weight)
            tensor = widened(weight) if isinstance(weight, Codes) or weight.is_floating_point() else weight
            if isinstance(weight, Codes) and (blocks := weight.blocks()) is not None:
                file = folder / _BLOCKS_FOLDER / f"{len(kept)}.safetensors"
                kept[digest_of(tensor.numpy())] = _stored(file, blocks)
            yield name, tensor.contiguous()

    _write_shards(folder, tensors())
    return kept


def _check_widened(folder: Path, name: str, weight: Weight) -> None:
    """Checks that a weight is no longer as it is stored.

    Raises:
        SourceError: It is in numbers that mean nothing without a scale.
    """
    if isinstance(weight, Codes):
        return
    if weight.dtype in FLOAT8 or (name.endswith("weight") and not weight.is_floating_point()):
        raise SourceError(
            f"{folder}: {name} is stored as {str(weight.dtype).removeprefix('torch.')}, and has no scale there; fetch "
            "the folder again"
        )


def _stored(file: Path, blocks: Blocks) -> Callable[[], Blocks]:
    """Writes blocks, and returns what reads them again."""
    file.parent.mkdir(exist_ok=True)
    arrays = {"codes": blocks.codes, "scales": blocks.scales, "zeros": blocks.zeros}
    arrays |= {} if blocks.order is None else {"order": blocks.order}
    save_tensors({name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in arrays.items()}, file)

    def read() -> Blocks:
        return Blocks(**{name: tensor().numpy() for name, tensor in stored_tensors([file]).items()})

    return read


def _write_shards(folder: Path, tensors: Iterator[tuple[str, Tensor]]) -> None:
    places: dict[str, str] = {}
    shard: dict[str, Tensor] = {}
    num_bytes = 0

    def flush() -> None:
        name = f"model-{len(set(places.values())) + 1:05}.safetensors"
        save_tensors(shard, folder / name)
        places.update(dict.fromkeys(shard, name))
        shard.clear()

    for name, tensor in tensors:
        if shard and num_bytes + tensor.nbytes > _SHARD_BYTES:
            flush()
            num_bytes = 0
        shard[name] = tensor
        num_bytes += tensor.nbytes
    if shard:
        flush()
    index = {"metadata": {}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
