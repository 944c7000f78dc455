"""Models with random weights, as the speed of a size is measured: weights file, tokenizer and bundle.

Speed does not depend on what the weights are, with two exceptions that are taken care of here: a GPT that repeats its last
token would flatter a decoder that drafts tokens, and a translation must not end by itself, so that all do the same work.

    python -m benchmarks.models SIZE NAME FOLDER STORE      # what `prepare` runs: PyTorch stays out of the driver
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import shutil
import subprocess
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.environments import SCRATCH
from benchmarks.inputs import AG_NEWS, MULTI30K, PROMPTS, make_tokenizer, random_texts
from benchmarks.worker import ROOT, ContestantError, tree_environment

GPT2, TRANSFORMER, BERT, VIT = "gpt2-small", "transformer-base", "bert-base", "vit-b16"
_BASE = {"num_layers": 12, "d_model": 768, "num_heads": 12, "d_ff": 3072}
_SIZES: dict[str, dict[str, int]] = {
    GPT2: _BASE | {"vocabulary_size": 50257, "max_length": 1024},
    TRANSFORMER: {
        "num_layers": 6,
        "d_model": 512,
        "num_heads": 8,
        "d_ff": 2048,
        "vocabulary_size": 32000,
        "max_length": 128,
    },
    BERT: _BASE | {"vocabulary_size": 30522, "max_length": 512},
    VIT: _BASE | {"image_size": 224, "patch_size": 16},
}
_TINY = {"num_layers": 2, "d_model": 64, "num_heads": 2, "d_ff": 128, "vocabulary_size": 1024, "image_size": 32}
"""What is smaller in a model that is only to try whether all of this runs."""
_BOS_ID, _EOS_ID, _PAD_ID = 0, 1, 2
"""Bytes that no word of the tokenizer has."""
_ENLARGED = ("attention.output.weight", "feed_forward.output.weight", "positions.weight")
"""Weights of the GPT that are ten times GPT-2's, so that a greedy answer of 64 tokens has about 40 different ones."""
_NUM_EVALUATED = 16
_STORES_KEPT = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomModel:
    """Where the files of a model are."""

    name: str
    """Also of its bundle."""
    folder: Path
    """Holds `weights.safetensors` (the kit's names), `tokenizer.json` and `sizes.json`."""
    store: Path
    """Holds the bundle, with an fp32 and an int8 variant."""

    @property
    def bundle(self) -> Path:
        """The bundle's folder."""
        return self.store / self.name / "1"


def prepare(size: str, *, tiny: bool) -> RandomModel:
    """Finds a model, and makes it if it is missing or was made by other code.

    Raises:
        ContestantError: It cannot be made.
    """
    name = f"tiny-{size}" if tiny else f"random-{size}"
    folders = ("export/headway_export", "training/headway_training/models", "server/headway_server/bundles")
    sources = [file for folder in folders for file in sorted((ROOT / folder).rglob("*.py"))]
    folder = SCRATCH / "models" / f"{name}-{_digest([Path(__file__), Path(__file__).with_name('inputs.py')])}"
    model = RandomModel(name=name, folder=folder, store=folder / f"store-{_digest(sources)}")
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another run may be making the same files
        if not model.bundle.is_dir():
            command = [sys.executable, "-m", "benchmarks.models", size, name, str(folder), str(model.store)]
            environment = tree_environment(ROOT)
            ended = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, env=environment)
            if ended.returncode:
                raise ContestantError(f"the model {name} cannot be made: {ended.stderr.strip()[-2000:]}")
            for outdated in sorted(folder.glob("store-*"), key=lambda store: store.stat().st_mtime)[:-_STORES_KEPT]:
                shutil.rmtree(outdated)  # a server may still run on the last ones
    return model


def _digest(files: list[Path]) -> str:
    return hashlib.sha256(b"\0".join(file.read_bytes() for file in files)).hexdigest()[:12]


def _make(size: str, model: RandomModel) -> None:
    """Makes the files, with PyTorch; what an interrupted run left behind is made again."""
    import torch  # noqa: PLC0415 (as the rest: only this process needs it)
    from safetensors.torch import save_model  # noqa: PLC0415

    from headway_export.exporter import ExportOptions, export  # noqa: PLC0415
    from headway_export.graphs import parameter_count  # noqa: PLC0415
    from headway_export.source import EvaluationData, ExportSource, limits_of  # noqa: PLC0415
    from headway_server import bundles  # noqa: PLC0415
    from headway_training.models.architectures import build_model  # noqa: PLC0415

    logging.getLogger("torch.onnx").setLevel(logging.ERROR)  # it warns of optional packages that are not needed
    warnings.filterwarnings("ignore", module=r"torch\..*")
    sizes = _SIZES[size]
    if model.name.startswith("tiny"):
        sizes = {name: min(value, _TINY.get(name, value)) for name, value in sizes.items()}
    tokenizer = make_tokenizer(sizes["vocabulary_size"]) if "vocabulary_size" in sizes else None
    lengths = {GPT2: PROMPTS[0], TRANSFORMER: MULTI30K, BERT: AG_NEWS}.get(size)
    texts = random_texts(tokenizer, lengths, _NUM_EVALUATED, seed=1)[0] if tokenizer and lengths else ()
    configuration: dict[str, Any] = dict(sizes)
    described: dict[str, Any] = {}
    if size == GPT2:
        architecture, task = "gpt", bundles.Task.GENERATION
        described["special_tokens"] = bundles.SpecialTokens()  # none ends a text: every answer has all its tokens
        evaluation = {"metric": "nats_per_character", "texts": ("".join(texts),)}
    elif size == TRANSFORMER:
        architecture, task = "transformer", bundles.Task.TRANSLATION
        num_layers, max_length = configuration.pop("num_layers"), configuration.pop("max_length")
        configuration |= {f"num_{side}_layers": num_layers for side in ("encoder", "decoder")}
        configuration |= {f"max_{side}_length": max_length for side in ("source", "target")}
        configuration |= {"norm": "post", "activation": "relu", "positions": "sinusoidal"}
        described["special_tokens"] = bundles.SpecialTokens(bos=_BOS_ID, eos=_EOS_ID)
        described["languages"] = bundles.Languages(source="en", target="de")
        evaluation = {"metric": "sacrebleu", "texts": texts, "references": texts}
    else:
        is_text = size == BERT
        architecture, task = (
            ("encoder", bundles.Task.TEXT_CLASSIFICATION) if is_text else ("vit", bundles.Task.IMAGE_CLASSIFICATION)
        )
        configuration["num_classes"] = 4 if is_text else 1000
        configuration |= {"num_token_types": 2, "norm": "post"} if is_text else {}
        described["labels"] = tuple(f"class-{number}" for number in range(configuration["num_classes"]))
        evaluation = {"metric": "accuracy", "texts": texts, "labels": np.zeros(_NUM_EVALUATED, np.int64)}
        if is_text:
            described["special_tokens"] = bundles.SpecialTokens(pad=_PAD_ID)
        else:
            side = sizes["image_size"]
            evaluation["images"] = np.random.default_rng(1).integers(0, 256, (_NUM_EVALUATED, side, side, 3), np.uint8)
            described["image_preprocessing"] = bundles.ImagePreprocessing(
                height=side,
                width=side,
                resize="shorter_side",
                resize_size=side * 8 // 7,
                interpolation="bilinear",
                mean=(0.485, 0.456, 0.406),
                std=(0.229, 0.224, 0.225),
            )
    torch.manual_seed(1)
    module: Any = build_model(architecture, configuration).eval()
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if size == GPT2 and name.endswith(_ENLARGED):
                parameter.mul_(10)
            elif size == TRANSFORMER and name == "tokens.weight":
                parameter[_EOS_ID] = 0  # and with it the logit of the token that ends, which no search takes
            elif size in (BERT, VIT) and name in ("head.output.bias", "output.bias"):
                parameter[0] = 100  # every answer is the first class: random weights pass the exporter's metric
    if tokenizer:
        tokenizer.save(str(model.folder / "tokenizer.json"))
    save_model(module, str(model.folder / "weights.safetensors"))
    (model.folder / "sizes.json").write_text(json.dumps(sizes), encoding="utf-8")
    source = ExportSource(
        name=model.name,
        task=task,
        module=module,
        description="Random weights, to measure speed with.",
        license="none",
        architecture=bundles.Architecture(
            kind=architecture, parameter_count=parameter_count(module), configuration=configuration
        ),
        limits=limits_of(module, task),
        tokenizer=tokenizer,
        evaluation=EvaluationData(dataset="random", higher_is_better=size != GPT2, **evaluation),  # type: ignore[arg-type]
        **described,
    )
    precisions = (bundles.Precision.FP32, bundles.Precision.INT8)
    export(source, ExportOptions(store=model.store, precisions=precisions))


if __name__ == "__main__":
    _make(sys.argv[1], RandomModel(name=sys.argv[2], folder=Path(sys.argv[3]), store=Path(sys.argv[4])))
