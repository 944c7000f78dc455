"""Models with random weights, as the speed of a size is measured: weights file, tokenizer and bundle, kept on disk.

Files are kept below a folder, by a key of all that goes into them, and made where they are missing.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import shutil
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from machine import ROOT

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from torch import nn

    from headway_export.source import ExportSource

_STORES_KEPT = 3
_SOURCES = ("export/headway_export", "training/headway_training/models", "server/headway_server/bundles")


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """Sizes of a decoder-only model, or of each of the two stacks of an encoder-decoder model."""

    name: str
    num_layers: int
    d_model: int
    num_heads: int
    d_ff: int
    vocabulary_size: int
    max_length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomModel:
    """Where the files of a model are."""

    geometry: Geometry
    folder: Path
    """Holds `weights.safetensors` (the kit's names), `tokenizer.json` and `geometry.json`."""
    store: Path
    """Holds one bundle with an fp32 and an int8 variant."""

    @property
    def name(self) -> str:
        """The model's name in the store."""
        return f"random-{self.geometry.name}"

    @property
    def bundle(self) -> Path:
        """The bundle's folder."""
        return self.store / self.name / "1"


Build: TypeAlias = "Callable[[Geometry], tuple[nn.Module, Tokenizer]]"
"""Makes a model, in evaluation mode, and its tokenizer; a function of a module, called in another process."""
Describe: TypeAlias = "Callable[[RandomModel, nn.Module, Tokenizer], ExportSource]"
"""Says what is exported."""


def prepare(geometry: Geometry, scratch: Path, *, code: Path, build: Build, describe: Describe) -> RandomModel:
    """Finds a model's files, and makes what is missing or was made by other code.

    Args:
        geometry: Its sizes.
        scratch: Folder that everything is kept below.
        code: The file that makes the weights.
        build: Makes the model.
        describe: Says what is exported.

    Raises:
        ExportError: The exporter refuses the model.
        HeadwayError: The server's parts do not run it.
    """
    key = _key(json.dumps(asdict(geometry)).encode(), Path(__file__).read_bytes(), code.read_bytes())
    folder = scratch / f"{geometry.name}-{key}"
    sources = [file for source in _SOURCES for file in sorted((ROOT / source).rglob("*.py"))]
    store = folder / f"store-{_key(*(file.read_bytes() for file in sources))}"
    model = RandomModel(geometry=geometry, folder=folder, store=store)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another run may be making the same files
        if not model.bundle.is_dir():
            # PyTorch stays out of the process that measures.
            with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
                pool.submit(_make, model, build, describe).result()
    return model


def _key(*parts: bytes) -> str:
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:12]


# What follows runs in a process of its own, with PyTorch.


def _make(model: RandomModel, build: Build, describe: Describe) -> None:
    """Makes the files; what an interrupted run left behind is made again."""
    import logging  # noqa: PLC0415 (as the rest: only this process needs it)
    import warnings  # noqa: PLC0415

    from safetensors.torch import save_model  # noqa: PLC0415

    from headway_export.exporter import ExportOptions, export  # noqa: PLC0415
    from headway_server.bundles import Precision  # noqa: PLC0415

    logging.getLogger("torch.onnx").setLevel(logging.ERROR)  # it warns of optional packages that are not needed
    warnings.filterwarnings("ignore", module=r"torch\..*")
    module, tokenizer = build(model.geometry)
    if not (model.folder / "geometry.json").is_file():
        save_model(module, str(model.folder / "weights.safetensors"))
        tokenizer.save(str(model.folder / "tokenizer.json"))
        (model.folder / "geometry.json").write_text(json.dumps(asdict(model.geometry)), encoding="utf-8")
    source = describe(model, module, tokenizer)
    export(source, ExportOptions(store=model.store, precisions=(Precision.FP32, Precision.INT8)))
    stores = sorted(model.folder.glob("store-*"), key=lambda store: store.stat().st_mtime)
    for outdated in stores[:-_STORES_KEPT]:  # a server may still run on the one before
        shutil.rmtree(outdated)
