"""BERT-base and ViT-B/16 with random weights, as the speed of these sizes is measured: their bundles.

Speed does not depend on what the weights are. The first class gets a large bias, so that every answer is that class:
the exporter's check of the task metric passes whatever random weights would say, and measures nothing here.

Stores are kept below a folder by a key of all that goes into them, and made where they are missing.
"""

from __future__ import annotations

import fcntl
import hashlib
import shutil
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from machine import ROOT
from texts import make_tokenizer, random_texts

if TYPE_CHECKING:
    from headway_export.source import ExportSource
    from headway_training.models.encoder import Encoder
    from headway_training.models.vit import ViT

SEED = 1
BERT, VIT = "random-bert-base", "random-vit-b16"
_SURE = 100.0
"""The bias of the first class."""
_NUM_EVALUATED = 8
_STORES_KEPT = 2
_SOURCES = ("export/headway_export", "training/headway_training/models", "server/headway_server/bundles")
_SIZES: dict[str, dict[str, dict[str, Any]]] = {
    "base": {
        BERT: {
            "vocabulary_size": 30522,
            "max_length": 512,
            "num_layers": 12,
            "d_model": 768,
            "num_heads": 12,
            "d_ff": 3072,
            "num_token_types": 2,
            "norm": "post",
        },
        VIT: {"image_size": 224, "patch_size": 16, "num_layers": 12, "d_model": 768, "num_heads": 12, "d_ff": 3072},
    },
    "tiny": {
        BERT: {
            "vocabulary_size": 2000,
            "max_length": 512,
            "num_layers": 2,
            "d_model": 64,
            "num_heads": 2,
            "d_ff": 128,
            "num_token_types": 2,
            "norm": "post",
        },
        VIT: {"image_size": 32, "patch_size": 16, "num_layers": 2, "d_model": 64, "num_heads": 2, "d_ff": 128},
    },
}
_NUM_CLASSES = {BERT: 4, VIT: 1000}


def vocabulary_size(size: str) -> int:
    """Tokens that the text model knows."""
    return int(_SIZES[size][BERT]["vocabulary_size"])


def prepare(size: str, scratch: Path) -> Path:
    """Finds the store with both models, and makes it if it is missing or was made by other code.

    Args:
        size: `base`, or `tiny` to see whether all of this runs.
        scratch: Folder that the store is kept below.

    Raises:
        ExportError: The exporter refuses a model.
    """
    files = [file for source in _SOURCES for file in sorted((ROOT / source).rglob("*.py"))]
    files += [Path(__file__), Path(__file__).with_name("texts.py")]
    digest = hashlib.sha256(b"\0".join(file.read_bytes() for file in files)).hexdigest()[:12]
    store = scratch / f"encoders-{size}-{digest}"
    store.mkdir(parents=True, exist_ok=True)
    with (store / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another run may be making the same files
        missing = [name for name in _SIZES[size] if not (store / name / "1" / "bundle.json").is_file()]
        if missing:  # PyTorch stays out of the process that measures
            with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
                for name in missing:
                    pool.submit(_export, name, size, store).result()
            _remove_outdated(size, scratch)
    return store


def _remove_outdated(size: str, scratch: Path) -> None:
    """Removes stores that other code made, but for the last ones: a server may still run on them."""
    stores = sorted(scratch.glob(f"encoders-{size}-*"), key=lambda store: store.stat().st_mtime)
    for outdated in stores[:-_STORES_KEPT]:
        shutil.rmtree(outdated)


# What follows runs in a process of its own, with PyTorch.


def _export(name: str, size: str, store: Path) -> None:
    import logging  # noqa: PLC0415 (as the rest: only this process needs it)
    import warnings  # noqa: PLC0415

    from headway_export.exporter import ExportOptions, export  # noqa: PLC0415
    from headway_server.bundles import Precision  # noqa: PLC0415

    logging.getLogger("torch.onnx").setLevel(logging.ERROR)  # it warns of optional packages that are not needed
    warnings.filterwarnings("ignore", module=r"torch\..*")
    source = _text_source(_SIZES[size][name]) if name == BERT else _image_source(_SIZES[size][name])
    export(source, ExportOptions(store=store, precisions=(Precision.FP32, Precision.INT8)))


def _text_source(sizes: dict[str, Any]) -> ExportSource:
    import torch  # noqa: PLC0415

    from headway_export.source import EvaluationData  # noqa: PLC0415
    from headway_server.bundles import Limits, SpecialTokens, Task  # noqa: PLC0415
    from headway_training.models.encoder import Encoder, EncoderConfig  # noqa: PLC0415

    torch.manual_seed(SEED)
    module = Encoder(EncoderConfig(**sizes, num_classes=_NUM_CLASSES[BERT])).eval()
    tokenizer = make_tokenizer(sizes["vocabulary_size"])
    texts = random_texts(sizes["vocabulary_size"], _NUM_EVALUATED, seed=SEED)
    return _source(
        BERT,
        Task.TEXT_CLASSIFICATION,
        module,
        limits=Limits(max_input_tokens=sizes["max_length"]),
        tokenizer=tokenizer,
        special_tokens=SpecialTokens(pad=tokenizer.token_to_id("[PAD]")),
        evaluation=EvaluationData(
            dataset="random words",
            metric="accuracy",
            higher_is_better=True,
            texts=tuple(texts),
            labels=np.zeros(_NUM_EVALUATED, np.int64),
        ),
    )


def _image_source(sizes: dict[str, Any]) -> ExportSource:
    import torch  # noqa: PLC0415

    from headway_export.source import EvaluationData  # noqa: PLC0415
    from headway_server.bundles import ImagePreprocessing, Limits, Task  # noqa: PLC0415
    from headway_training.models.vit import ViT, ViTConfig  # noqa: PLC0415

    torch.manual_seed(SEED)
    module = ViT(ViTConfig(**sizes, num_classes=_NUM_CLASSES[VIT])).eval()
    side = sizes["image_size"]
    pixels = np.random.default_rng(SEED).integers(0, 256, (_NUM_EVALUATED, side, side, 3), np.uint8)
    return _source(
        VIT,
        Task.IMAGE_CLASSIFICATION,
        module,
        limits=Limits(),
        image_preprocessing=ImagePreprocessing(
            height=side,
            width=side,
            resize="shorter_side",
            resize_size=side * 8 // 7,
            interpolation="bilinear",
            mean=(0.485, 0.456, 0.406),
            std=(0.229, 0.224, 0.225),
        ),
        evaluation=EvaluationData(
            dataset="noise",
            metric="accuracy",
            higher_is_better=True,
            images=pixels,
            labels=np.zeros(_NUM_EVALUATED, np.int64),
        ),
    )


def _source(name: str, task: Any, module: Encoder | ViT, **fields: Any) -> ExportSource:
    import torch  # noqa: PLC0415

    from headway_export.graphs import parameter_count  # noqa: PLC0415
    from headway_export.source import ExportSource  # noqa: PLC0415
    from headway_server.bundles import Architecture  # noqa: PLC0415

    output = module.output if name == VIT else module.head.output
    assert isinstance(output, torch.nn.Linear)
    with torch.no_grad():
        output.bias[0] = _SURE
    return ExportSource(
        name=name,
        task=task,
        module=module,
        description="Random weights, to measure speed with.",
        license="none",
        architecture=Architecture(
            kind="vit" if name == VIT else "encoder",
            parameter_count=parameter_count(module),
            configuration=module.configuration.to_dict(),
        ),
        labels=tuple(f"class-{number}" for number in range(_NUM_CLASSES[name])),
        **fields,
    )
