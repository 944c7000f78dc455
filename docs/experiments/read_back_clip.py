"""Makes a checkpoint of the shipped CLIP from its two int8 bundles: python docs/experiments/read_back_clip.py OUTPUT.

For runs that start from it (`headway-train run caption --init OUTPUT`) where no run of the recipe clip is at hand.
Matrices are their int8 codes times their scales; the rest is in the bundles as it was. The learned temperature is in
no bundle and is set to 1 / 40.
"""

import json
import math
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import onnx
import torch
import typer
from numpy.typing import NDArray
from onnx import numpy_helper
from tokenizers import Tokenizer

from headway_training.checkpoint import Checkpoint, ImagePreprocessing, SpecialTokens, write_checkpoint
from headway_training.models import build_model, make_configuration

MODELS = Path(__file__).parents[2] / "models"
SCALE = 40.0
_PREFIX = "traced.module."


def read_tower(file: Path) -> dict[str, NDArray[np.float32]]:
    """The weights of a tower by their names in it, from the graph that is served."""
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
    return {name.removeprefix(_PREFIX): value for name, value in weights.items()}


def main(output: Annotated[Path, typer.Argument(help="Folder of the checkpoint.")]) -> None:
    """Writes a checkpoint of the shipped CLIP."""
    image, text = (
        json.loads((MODELS / name / "1" / "bundle.json").read_text(encoding="utf-8"))
        for name in ("clip-image", "clip-text")
    )
    model = build_model("clip", make_configuration("clip", image["architecture"]["configuration"]))
    weights = {
        f"{tower}_tower.{name}": torch.tensor(value)
        for tower in ("image", "text")
        for name, value in read_tower(MODELS / f"clip-{tower}" / "1" / "int8" / "model.onnx").items()
    }
    model.load_state_dict({**weights, "logit_scale": torch.tensor(math.log(SCALE))})
    preprocessing: dict[str, Any] = image["image_preprocessing"]
    checkpoint = Checkpoint(
        name="clip",
        task="image_text_embedding",
        description=image["description"],
        license=image["license"],
        architecture="clip",
        configuration=image["architecture"]["configuration"],
        special_tokens=SpecialTokens(**{name: text["special_tokens"].get(name) for name in SpecialTokens.model_fields}),
        image_preprocessing=ImagePreprocessing(
            **{name: preprocessing[name] for name in ImagePreprocessing.model_fields}
        ),
    )
    tokenizer = Tokenizer.from_file(str(MODELS / "clip-text" / "1" / "tokenizer.json"))
    write_checkpoint(output, checkpoint, model, tokenizer=tokenizer)


if __name__ == "__main__":
    typer.run(main)
