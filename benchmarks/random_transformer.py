"""A Transformer with random weights, as the speed of a size is measured: its weights, its tokenizer and its bundle.

Speed does not depend on what the weights are, save that a translation must not end by itself, so that all sides
produce the same numbers of tokens: the embedding of the token that ends one is zero, and so is its logit, which no
search takes.

Files are kept below a folder, by a key of all that goes into them, and made where they are missing.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import shutil
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING

from machine import ROOT
from random_gpt import make_tokenizer
from sentences import SentenceSource

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from headway_training.models.transformer import Transformer

SEED = 1
BOS_ID, EOS_ID = 0, 1
"""Bytes that no word of the tokenizer has; a translation begins and would end with them."""
_MAX_LENGTH = 128
_EVALUATED = 32
_STORES_KEPT = 3
_SOURCES = ("export/headway_export", "training/headway_training/models", "server/headway_server/bundles")


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """Sizes of a Transformer; both of its stacks have the same."""

    name: str
    num_layers: int
    d_model: int
    num_heads: int
    d_ff: int
    vocabulary_size: int
    max_length: int = _MAX_LENGTH


GEOMETRIES = {
    geometry.name: geometry
    for geometry in (
        Geometry(name="transformer-base", num_layers=6, d_model=512, num_heads=8, d_ff=2048, vocabulary_size=32_000),
        Geometry(name="tiny-transformer", num_layers=2, d_model=64, num_heads=2, d_ff=128, vocabulary_size=1024),
    )
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomTransformer:
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


def prepare(geometry: Geometry, scratch: Path) -> RandomTransformer:
    """Finds a model's files, and makes what is missing or was made by other code.

    Raises:
        ExportError: The exporter refuses the model.
        HeadwayError: The server's parts do not run it.
    """
    folder = scratch / f"{geometry.name}-{_key(json.dumps(asdict(geometry)).encode(), Path(__file__).read_bytes())}"
    sources = [file for source in _SOURCES for file in sorted((ROOT / source).rglob("*.py"))]
    store = folder / f"store-{_key(*(file.read_bytes() for file in sources))}"
    model = RandomTransformer(geometry=geometry, folder=folder, store=store)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another run may be making the same files
        if not model.bundle.is_dir():
            # PyTorch stays out of the process that measures.
            with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
                pool.submit(_make, model).result()
    return model


def _key(*parts: bytes) -> str:
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:12]


# What follows runs in a process of its own, with PyTorch.


def _make(model: RandomTransformer) -> None:
    """Makes the files; what an interrupted run left behind is made again."""
    import logging  # noqa: PLC0415
    import warnings  # noqa: PLC0415

    from safetensors.torch import save_model  # noqa: PLC0415

    logging.getLogger("torch.onnx").setLevel(logging.ERROR)  # it warns of optional packages that are not needed
    warnings.filterwarnings("ignore", module=r"torch\..*")
    module = _random_module(model.geometry)
    tokenizer = make_tokenizer(model.geometry.vocabulary_size)
    if not (model.folder / "geometry.json").is_file():
        save_model(module, str(model.folder / "weights.safetensors"))
        tokenizer.save(str(model.folder / "tokenizer.json"))
        (model.folder / "geometry.json").write_text(json.dumps(asdict(model.geometry)), encoding="utf-8")
    _export(model, module, tokenizer)
    stores = sorted(model.folder.glob("store-*"), key=lambda store: store.stat().st_mtime)
    for outdated in stores[:-_STORES_KEPT]:  # a server may still run on the one before
        shutil.rmtree(outdated)


def _random_module(geometry: Geometry) -> Transformer:
    import torch  # noqa: PLC0415

    from headway_training.models.transformer import Transformer, TransformerConfig  # noqa: PLC0415

    torch.manual_seed(SEED)
    configuration = TransformerConfig(
        vocabulary_size=geometry.vocabulary_size,
        max_source_length=geometry.max_length,
        max_target_length=geometry.max_length,
        num_encoder_layers=geometry.num_layers,
        num_decoder_layers=geometry.num_layers,
        d_model=geometry.d_model,
        num_heads=geometry.num_heads,
        d_ff=geometry.d_ff,
        norm="post",
        activation="relu",
        positions="sinusoidal",
    )
    module = Transformer(configuration).eval()
    with torch.no_grad():
        module.tokens.weight[EOS_ID] = 0.0
    return module


def _export(model: RandomTransformer, module: Transformer, tokenizer: Tokenizer) -> None:
    from headway_export.exporter import ExportOptions, export  # noqa: PLC0415
    from headway_export.graphs import parameter_count  # noqa: PLC0415
    from headway_export.source import EvaluationData, ExportSource, limits_of  # noqa: PLC0415
    from headway_server.bundles import Architecture, Languages, Precision, SpecialTokens, Task  # noqa: PLC0415

    sentences = SentenceSource(tokenizer, seed=SEED).take(_EVALUATED)
    source = ExportSource(
        name=model.name,
        task=Task.TRANSLATION,
        module=module,
        description="Random weights, to measure speed with.",
        license="none",
        architecture=Architecture(
            kind="transformer", parameter_count=parameter_count(module), configuration=module.configuration.to_dict()
        ),
        limits=limits_of(module, Task.TRANSLATION),
        tokenizer=tokenizer,
        special_tokens=SpecialTokens(bos=BOS_ID, eos=EOS_ID),
        languages=Languages(source="en", target="de"),
        evaluation=EvaluationData(
            dataset="random words",
            metric="sacrebleu",
            higher_is_better=True,
            texts=tuple(sentence.text for sentence in sentences),
            references=tuple(sentence.text for sentence in sentences),
        ),
    )
    export(source, ExportOptions(store=model.store, precisions=(Precision.FP32, Precision.INT8)))
