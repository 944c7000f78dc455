"""Makes a checkpoint of a shipped model from its int8 bundle: python docs/journal/read_back.py clip|segment OUTPUT.

For runs that start from it (`headway-train run caption --init OUTPUT`) where no run of its recipe is at hand.
Matrices are their int8 codes times their scales; the rest is in the bundles as it was. CLIP's learned temperature is in
no bundle and is set to 1 / 40.
"""

import json
import math
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import onnx
import torch
import typer
from numpy.typing import NDArray
from onnx import numpy_helper
from tokenizers import Tokenizer

from headway_training.checkpoint import Checkpoint, ImagePreprocessing, SpecialTokens, TaskName, write_checkpoint
from headway_training.models import build_model, make_configuration

MODELS = Path(__file__).parents[2] / "models"
SCALE = 40.0
_PREFIX = "traced.module."


def read_weights(file: Path) -> dict[str, NDArray[np.float32]]:
    """The weights of a module by their names in it, from the graph that is served."""
    graph = onnx.load(file).graph
    stored = {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer}
    maker = {output: node for node in graph.node for output in node.output}
    users: dict[str, list[onnx.NodeProto]] = {}
    for node in graph.node:
        for name in node.input:
            users.setdefault(name, []).append(node)
    weights = {name: value for name, value in stored.items() if name.startswith(_PREFIX) and value.dtype == np.float32}

    def factor(node: onnx.NodeProto) -> str:
        """What the result of a node is multiplied with, once it is a float."""
        cast = next(user for user in users[node.output[0]] if user.op_type == "Cast")
        product = next(user for user in users[cast.output[0]] if user.op_type == "Mul")
        return str(next(name for name in product.input if name != cast.output[0]))

    for node in graph.node:
        if node.op_type == "Gather" and node.input[0].endswith(".int8_rows"):
            scale = maker[factor(node)]
            while scale.op_type != "Gather":
                scale = maker[scale.input[0]]
            codes = stored[node.input[0]].astype(np.float32)
            weights[node.input[0].removesuffix(".int8_rows")] = codes * stored[scale.input[0]][:, None]
        if node.op_type == "MatMulInteger":
            step = float(stored[maker[node.input[0]].input[1]])  # of the rows that are multiplied
            scales = stored[factor(node)][:, None] / step
            if node.input[1] in stored:
                scaled = users[users[node.output[0]][0].output[0]][0]
                added = users[users[scaled.output[0]][0].output[0]][0]
                bias = next(name for name in added.input if name in stored)
                codes, name = stored[node.input[1]].T, f"{bias.removesuffix('.bias')}.weight"
            else:
                source = maker[node.input[1]].input[0]
                codes, name = stored[source], source.removesuffix(".int8_rows")
            weights[name] = codes.astype(np.float32) * scales
        if node.op_type == "MatMul" and node.input[1] in stored and node.input[1] not in weights:  # left in fp32
            added = users[node.output[0]][0]
            bias = next(name for name in added.input if name in stored)
            weights[f"{bias.removesuffix('.bias')}.weight"] = stored[node.input[1]].T
    return {name.removeprefix(_PREFIX): value for name, value in weights.items()}


def main(
    model: Annotated[Literal["clip", "segment"], typer.Argument(help="Which of the shipped models.")],
    output: Annotated[Path, typer.Argument(help="Folder of the checkpoint.")],
) -> None:
    """Writes a checkpoint of a shipped model."""
    if model == "clip":
        write_clip(output)
    else:
        write_segmenter(output)


def write_clip(output: Path) -> None:
    """Puts both towers together, with a temperature of 1 / 40."""
    image, text = _bundle("clip-image"), _bundle("clip-text")
    model = build_model("clip", make_configuration("clip", image["architecture"]["configuration"]))
    weights = {
        f"{tower}_tower.{name}": torch.tensor(value)
        for tower in ("image", "text")
        for name, value in read_weights(_graph(f"clip-{tower}", "model")).items()
    }
    model.load_state_dict({**weights, "logit_scale": torch.tensor(math.log(SCALE))})
    special = SpecialTokens(**{name: text["special_tokens"].get(name) for name in SpecialTokens.model_fields})
    checkpoint = _checkpoint(image, "clip", "image_text_embedding", special_tokens=special)
    tokenizer = Tokenizer.from_file(str(MODELS / "clip-text" / "1" / "tokenizer.json"))
    write_checkpoint(output, checkpoint, model, tokenizer=tokenizer)


def write_segmenter(output: Path) -> None:
    """Puts encoder and decoder together; what the architecture has gained since the bundle was made starts fresh."""
    bundle = _bundle("segment")
    model = build_model("segmenter", make_configuration("segmenter", bundle["architecture"]["configuration"]))
    weights = {
        f"{part}.{name}": torch.tensor(value)
        for part in ("encoder", "decoder")
        for name, value in read_weights(_graph("segment", part)).items()
    }
    typer.echo(model.load_state_dict(weights, strict=False))
    write_checkpoint(output, _checkpoint(bundle, "segmenter", "segmentation"), model)


def _bundle(name: str) -> dict[str, Any]:
    manifest: dict[str, Any] = json.loads((MODELS / name / "1" / "bundle.json").read_text(encoding="utf-8"))
    return manifest


def _graph(name: str, role: str) -> Path:
    return MODELS / name / "1" / "int8" / f"{role}.onnx"


def _checkpoint(bundle: dict[str, Any], architecture: str, task: TaskName, **more: Any) -> Checkpoint:
    preprocessing = bundle["image_preprocessing"]
    return Checkpoint(
        name=bundle["name"].removesuffix("-image"),
        task=task,
        description=bundle["description"],
        license=bundle["license"],
        architecture=architecture,
        configuration=bundle["architecture"]["configuration"],
        image_preprocessing=ImagePreprocessing(
            **{name: preprocessing[name] for name in ImagePreprocessing.model_fields}
        ),
        **more,
    )


if __name__ == "__main__":
    typer.run(main)
