"""A GPT with random weights, as the speed of a size is measured: its weights file, its tokenizer and its bundle.

Speed does not depend on what the weights are, save in one way: a GPT as it is initialised repeats its last token, which
would flatter a decoder that guesses ahead. So positions, and what the layers write into the residual stream, weigh more
here; a greedy answer of 64 tokens then has about 40 different ones.

Files are kept below a folder, by a key of all that goes into them, and made where they are missing.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import shutil
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from machine import ROOT
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

if TYPE_CHECKING:
    from headway_training.models.gpt import GPT

SEED = 1
_ENLARGED = ("attention.output.weight", "feed_forward.output.weight", "positions.weight")
_FACTOR = 10.0
"""By which these are larger than GPT-2's."""
_EVALUATION_TOKENS = 2048
_STORES_KEPT = 3
_LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
_SPACE = "\u0120"  # what byte-level vocabularies write for a space
_SOURCES = ("export/headway_export", "training/headway_training/models", "server/headway_server/bundles")


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """Sizes of a GPT."""

    name: str
    num_layers: int
    d_model: int
    num_heads: int
    vocabulary_size: int
    max_length: int


GEOMETRIES = {
    geometry.name: geometry
    for geometry in (
        Geometry(name="gpt2-small", num_layers=12, d_model=768, num_heads=12, vocabulary_size=50257, max_length=1024),
        Geometry(name="tiny", num_layers=2, d_model=64, num_heads=2, vocabulary_size=1024, max_length=512),
    )
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomGpt:
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


def prepare(geometry: Geometry, scratch: Path) -> RandomGpt:
    """Finds a model's files, and makes what is missing or was made by other code.

    Raises:
        ExportError: The exporter refuses the model.
        HeadwayError: The server's parts do not run it.
    """
    own = {"geometry": asdict(geometry), "seed": SEED, "code": _digest([Path(__file__)])}
    folder = scratch / f"{geometry.name}-{_key(own)}"
    sources = [file for source in _SOURCES for file in sorted((ROOT / source).rglob("*.py"))]
    store = folder / f"store-{_key({'code': _digest(sources)})}"
    model = RandomGpt(geometry=geometry, folder=folder, store=store)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another run may be making the same files
        if not model.bundle.is_dir():
            # PyTorch stays out of the process that measures.
            with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
                pool.submit(_make, model).result()
    return model


def words(vocabulary_size: int) -> Iterator[str]:
    """The words that are one token each: a space and three letters."""
    letters = _alphabet(vocabulary_size)
    return (f" {a}{b}{c}" for a in letters for b in letters for c in letters)


def make_tokenizer(vocabulary_size: int) -> Tokenizer:
    """Returns a byte-level tokenizer of exactly so many tokens, like GPT-2's."""
    merges = _merges(vocabulary_size)
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *(left + right for left, right in merges)]
    tokenizer = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|endoftext|>", special=True)])
    assert tokenizer.get_vocab_size() == vocabulary_size, "merges fill what bytes and the special token leave"
    return tokenizer


def _key(values: object) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:12]


def _digest(files: list[Path]) -> str:
    return hashlib.sha256(b"\0".join(file.read_bytes() for file in files)).hexdigest()


def _alphabet(vocabulary_size: int) -> str:
    """Returns as many letters as there is room for: all their pairs and all words of a space and three of them."""
    room = vocabulary_size - 256 - 1
    size = max(n for n in range(len(_LETTERS) + 1) if n + n**2 + n**3 <= room)
    return _LETTERS[:size]


def _merges(vocabulary_size: int) -> list[tuple[str, str]]:
    """Returns byte-pair merges, first things first: a space with a letter, pairs, words, and pairs of pairs.

    In that order, `abc` behind a space is always made of `_a` and `bc`, so that a word is one token wherever it is.
    """
    letters = _alphabet(vocabulary_size)
    pairs = [a + b for a in letters for b in letters]
    merges = [(_SPACE, a) for a in letters]
    merges += [(pair[0], pair[1]) for pair in pairs]
    merges += [(_SPACE + a, pair) for a in letters for pair in pairs]
    merges += [(left, right) for left in pairs for right in pairs]
    return merges[: vocabulary_size - 256 - 1]


# What follows runs in a process of its own, with PyTorch.


def _make(model: RandomGpt) -> None:
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


def _random_module(geometry: Geometry) -> GPT:
    import torch  # noqa: PLC0415

    from headway_training.models.gpt import GPT, GPTConfig  # noqa: PLC0415

    torch.manual_seed(SEED)
    configuration = GPTConfig(
        vocabulary_size=geometry.vocabulary_size,
        max_length=geometry.max_length,
        num_layers=geometry.num_layers,
        d_model=geometry.d_model,
        num_heads=geometry.num_heads,
        d_ff=4 * geometry.d_model,
    )
    module = GPT(configuration).eval()
    for name, parameter in module.named_parameters():
        if name.endswith(_ENLARGED):
            parameter.data.mul_(_FACTOR)
    return module


def _export(model: RandomGpt, module: GPT, tokenizer: Tokenizer) -> None:
    from headway_export.exporter import ExportOptions, export  # noqa: PLC0415
    from headway_export.graphs import parameter_count  # noqa: PLC0415
    from headway_export.source import EvaluationData, ExportSource, limits_of  # noqa: PLC0415
    from headway_server.bundles import Architecture, Precision, SpecialTokens, Task  # noqa: PLC0415

    source = ExportSource(
        name=model.name,
        task=Task.GENERATION,
        module=module,
        description="Random weights, to measure speed with.",
        license="none",
        architecture=Architecture(
            kind="gpt", parameter_count=parameter_count(module), configuration=module.configuration.to_dict()
        ),
        limits=limits_of(module, Task.GENERATION),
        tokenizer=tokenizer,
        special_tokens=SpecialTokens(),  # none ends a text, so that every answer has all its tokens
        evaluation=EvaluationData(
            dataset="random words",
            metric="nats_per_character",
            higher_is_better=False,
            texts=(_random_text(model.geometry.vocabulary_size),),
        ),
    )
    export(source, ExportOptions(store=model.store, precisions=(Precision.FP32, Precision.INT8)))


def _random_text(vocabulary_size: int) -> str:
    known = list(words(vocabulary_size))
    chosen = np.random.default_rng(SEED).integers(0, len(known), _EVALUATION_TOKENS)
    return "".join(known[index] for index in chosen)
