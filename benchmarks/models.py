"""Models with random weights, as the speed of a size is measured: sizes, tokenizer and bundle.

Speed does not depend on what the weights are, with two exceptions that are taken care of here: a GPT that repeats its
last token would flatter a decoder that drafts tokens, and a translation must not end by itself, so that all do the same
work. This module is also the worker that makes them, so that PyTorch stays out of the driver.
"""

import fcntl
import hashlib
import json
import logging
import warnings
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from benchmarks.environments import SCRATCH
from benchmarks.inputs import MULTI30K, make_tokenizer, random_texts
from benchmarks.worker import ROOT, Worker, serve, tree_environment

GPT2, TRANSFORMER, BERT, VIT = "gpt2-small", "transformer-base", "bert-base", "vit-b16"
_BASE = {"num_layers": 12, "d_model": 768, "num_heads": 12, "d_ff": 3072}
_SMALL = {"num_layers": 6, "d_model": 512, "num_heads": 8, "d_ff": 2048}
_MODELS: dict[str, tuple[str, str, dict[str, int]]] = {
    GPT2: ("gpt", "generation", _BASE | {"vocabulary_size": 50257, "max_length": 1024}),
    TRANSFORMER: ("transformer", "translation", _SMALL | {"vocabulary_size": 32000, "max_length": 128}),
    BERT: ("encoder", "text_classification", _BASE | {"vocabulary_size": 30522, "max_length": 512, "num_classes": 4}),
    VIT: ("vit", "image_classification", _BASE | {"image_size": 224, "patch_size": 16, "num_classes": 1000}),
}
"""By size: the kit's architecture, the task, and the sizes."""
_TINY = {"num_layers": 1, "d_model": 64, "num_heads": 2, "d_ff": 128, "vocabulary_size": 1024, "image_size": 32}
"""What is smaller in a model that is only to try whether all of this runs."""
_BOS_ID, _EOS_ID, _PAD_ID = 0, 1, 2
"""Bytes that no word of the tokenizer has."""
_ENLARGED = ("attention.output.weight", "feed_forward.output.weight", "positions.weight")
"""Weights of the GPT that are ten times GPT-2's, so that a greedy answer of 64 tokens has about 40 different ones."""
_NUM_EVALUATED = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomModel:
    """Where the files of a model are."""

    name: str
    """Also of its bundle."""
    folder: Path
    """Holds `sizes.json`, `tokenizer.json`, and what others convert for themselves."""
    store: Path
    """Holds the bundle, with the variants fp32, int8 and int8-static."""

    @property
    def bundle(self) -> Path:
        """The bundle's folder."""
        return self.store / self.name / "1"

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of a model that reads texts."""
        return Tokenizer.from_file(str(self.folder / "tokenizer.json"))


def prepare(*sizes: str, tiny: bool) -> dict[str, RandomModel]:
    """Finds models, by size, and makes those that are missing or were made by other code.

    Raises:
        ContestantError: One cannot be made.
    """
    folders = ("export/headway_export", "training/headway_training/models", "server/headway_server/bundles")
    exporting = _digest([file for folder in folders for file in sorted((ROOT / folder).rglob("*.py"))])
    sizing = _digest([Path(__file__), Path(__file__).with_name("inputs.py")])
    models = {}
    for size in sorted(sizes):
        name = f"tiny-{size}" if tiny else f"random-{size}"
        folder = SCRATCH / "models" / f"{name}-{sizing}"
        folder.mkdir(parents=True, exist_ok=True)
        models[size] = RandomModel(name=name, folder=folder, store=folder / f"store-{exporting}")
    with ExitStack() as stack:
        for model in models.values():  # another run may be making the same files
            fcntl.flock(stack.enter_context((model.folder / "lock").open("w")), fcntl.LOCK_EX)
        missing = {size: model for size, model in models.items() if not model.bundle.is_dir()}
        if missing:
            worker = stack.enter_context(Worker("models", environment=tree_environment(ROOT)))
        for size, model in missing.items():
            worker.ask(size=size, name=model.name, folder=str(model.folder), store=str(model.store))
    return models


def _digest(files: list[Path]) -> str:
    return hashlib.sha256(b"\0".join(file.read_bytes() for file in files)).hexdigest()[:12]


def _draw_module(size: str, architecture: str, configuration: dict[str, Any]) -> Any:
    """Draws a model's weights, the same each time."""
    import torch  # noqa: PLC0415 (as the rest: only this process needs it)

    from headway_training.models.architectures import build_model  # noqa: PLC0415

    torch.manual_seed(1)
    module = build_model(architecture, configuration).eval()
    num_classes = configuration.get("num_classes", 0)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if size == GPT2 and name.endswith(_ENLARGED):
                parameter.mul_(10)
            elif size == TRANSFORMER and name == "tokens.weight":
                parameter[_EOS_ID] = 0  # and with it the logit of the token that ends, which no search takes
            elif num_classes and name.endswith("output.bias") and parameter.shape == (num_classes,):
                parameter[0] = 100  # every answer is the first class
    return module


def _make(size: str, model: RandomModel) -> None:
    """Makes the files, with PyTorch; what an interrupted run left behind is made again."""
    import torch  # noqa: PLC0415 (as the rest: only this process needs it)

    from headway_export.exporter import ExportOptions, export  # noqa: PLC0415
    from headway_export.source import EvaluationData, ExportSource, limits_of  # noqa: PLC0415
    from headway_server import bundles  # noqa: PLC0415

    logging.getLogger("torch.onnx").setLevel(logging.ERROR)  # it warns of optional packages that are not needed
    warnings.filterwarnings("ignore", module=r"torch\..*")
    architecture, task, sizes = _MODELS[size]
    if model.name.startswith("tiny"):
        sizes = {name: min(value, _TINY.get(name, value)) for name, value in sizes.items()}
    (model.folder / "sizes.json").write_text(json.dumps(sizes), encoding="utf-8")
    configuration: dict[str, Any] = dict(sizes)
    fields: dict[str, Any] = {}
    texts: tuple[str, ...] = ()
    if architecture != "vit":
        fields["tokenizer"] = tokenizer = make_tokenizer(sizes["vocabulary_size"])
        tokenizer.save(str(model.folder / "tokenizer.json"))
        texts, _ = random_texts(tokenizer, MULTI30K, _NUM_EVALUATED)
    # Random weights must pass the exporter's task metric.
    evaluation: dict[str, Any] = {"metric": "accuracy", "texts": texts, "labels": np.zeros(_NUM_EVALUATED, np.int64)}
    if size == GPT2:
        fields["special_tokens"] = bundles.SpecialTokens()  # none ends a text: every answer has all its tokens
        evaluation = {"metric": "nats_per_character", "texts": ("".join(texts),)}
    elif size == TRANSFORMER:
        num_layers, max_length = configuration.pop("num_layers"), configuration.pop("max_length")
        configuration |= {f"num_{side}_layers": num_layers for side in ("encoder", "decoder")}
        configuration |= {f"max_{side}_length": max_length for side in ("source", "target")}
        configuration |= {"norm": "post", "activation": "relu", "positions": "sinusoidal"}
        fields["special_tokens"] = bundles.SpecialTokens(bos=_BOS_ID, eos=_EOS_ID)
        fields["languages"] = bundles.Languages(source="en", target="de")
        evaluation = {"metric": "sacrebleu", "texts": texts, "references": texts}
    elif size == BERT:
        configuration |= {"num_token_types": 2, "norm": "post"}
        fields["special_tokens"] = bundles.SpecialTokens(pad=_PAD_ID)
    else:
        side = sizes["image_size"]
        evaluation["images"] = np.random.default_rng(1).integers(0, 256, (_NUM_EVALUATED, side, side, 3), np.uint8)
        scaled = {
            "height": side,
            "width": side,
            "interpolation": "bilinear",
            "resize": "shorter_side",
            "resize_size": side * 8 // 7,
        }
        normalized = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}
        fields["image_preprocessing"] = bundles.ImagePreprocessing.model_validate(scaled | normalized)
    fields["labels"] = tuple(f"class-{number}" for number in range(configuration.get("num_classes", 0)))
    build = partial(_draw_module, size, architecture, configuration)
    module = build()
    source = ExportSource(
        name=model.name,
        task=bundles.Task(task),
        module=module,
        make_reference=build,
        description="Random weights, to measure speed with.",
        license="none",
        architecture=bundles.Architecture(
            kind=architecture, parameter_count=sum(map(torch.numel, module.parameters())), configuration=configuration
        ),
        limits=limits_of(module, bundles.Task(task)),
        evaluation=EvaluationData(dataset="random", higher_is_better=size != GPT2, **evaluation),
        **fields,
    )
    precisions = (bundles.Precision.FP32, bundles.Precision.INT8, bundles.Precision.INT8_STATIC)
    export(source, ExportOptions(store=model.store, precisions=precisions))


def _answer(request: dict[str, str]) -> dict[str, str]:
    folder, store = Path(request["folder"]), Path(request["store"])
    _make(request["size"], RandomModel(name=request["name"], folder=folder, store=store))
    return {}


if __name__ == "__main__":
    serve(_answer, ["torch"])
