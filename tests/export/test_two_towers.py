"""A model of two towers becomes two bundles whose vectors share a space."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from foreign import towers
from safetensors.torch import save_model
from tiny_towers import towers_checkpoint
from tokenizers import Tokenizer

from headway_export.errors import SourceError
from headway_export.exporter import ExportOptions, export
from headway_export.source import from_factory, sources_from_checkpoint
from headway_server.bundles import ImagePreprocessing, Precision, Task
from headway_training.checkpoint import CHECKPOINT_FILE, load_model, write_checkpoint


@pytest.fixture(scope="module")
def two_towers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return towers_checkpoint(tmp_path_factory.mktemp("towers") / "checkpoint")


def test_each_tower_is_proved_and_both_name_one_space(two_towers: Path, tmp_path: Path) -> None:
    options = ExportOptions(store=tmp_path, precisions=(Precision.FP32, Precision.INT8), attention=True)
    bundles = [export(source, options) for source in sources_from_checkpoint(two_towers)]
    manifests = [bundle.manifest for bundle in bundles]
    assert [(one.name, one.task) for one in manifests] == [
        ("tiny-clip-image", Task.IMAGE_EMBEDDING),
        ("tiny-clip-text", Task.TEXT_EMBEDDING),
    ]
    embeddings = [one.embedding for one in manifests]
    assert all(one is not None for one in embeddings)
    spaces = [one.space for one in embeddings if one is not None]
    assert spaces[0] == spaces[1]
    space = spaces[0]
    assert space is not None
    assert space.name.startswith("tiny-clip-")
    assert (space.probabilities, space.scale, space.bias) == ("sigmoid", pytest.approx(10.0), -10.0)
    for one in manifests:
        assert one.variants[Precision.FP32].parity.max_relative_logit_error < 1e-4
        agreement = one.variants[Precision.INT8].agreement
        assert agreement is not None
        assert (agreement.dataset, agreement.example_count) == ("tiny pairs", 4)
        assert one.variants[Precision.FP32].attention is not None


def test_the_fitted_temperature_divides_the_scale(two_towers: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(two_towers, tmp_path / "checkpoint")
    file = folder / CHECKPOINT_FILE
    content = json.loads(file.read_text(encoding="utf-8"))
    file.write_text(json.dumps(content | {"classification": {"temperature": 4.0}}), encoding="utf-8")
    for source in sources_from_checkpoint(folder):
        assert source.space is not None
        assert source.space.scale == pytest.approx(2.5)


def test_other_weights_make_another_space(two_towers: Path, tmp_path: Path) -> None:
    first = sources_from_checkpoint(two_towers)[0].space
    model, checkpoint = load_model(two_towers)
    with torch.no_grad():
        next(model.parameters()).add_(1.0)
    write_checkpoint(
        tmp_path / "other",
        checkpoint.model_copy(update={"evaluation": None}),
        model,
        tokenizer=Tokenizer.from_file(str(two_towers / "tokenizer.json")),
    )
    second = sources_from_checkpoint(tmp_path / "other", name="mine")
    assert [source.name for source in second] == ["mine-image", "mine-text"]
    assert first is not None
    assert second[0].space is not None
    assert second[0].space.name != first.name


def test_towers_from_outside_share_the_space_that_both_name(tokenizer_file: Path, tmp_path: Path) -> None:
    preprocessing = ImagePreprocessing(
        height=16, width=16, resize="stretch", interpolation="bicubic", mean=(0.5, 0.5, 0.5), std=(0.3, 0.3, 0.3)
    )
    manifests = []
    for side, parts in (
        ("image", {"image_preprocessing": preprocessing}),
        ("text", {"tokenizer_file": tokenizer_file}),
    ):
        weights = tmp_path / f"{side}.safetensors"
        save_model(getattr(towers, f"{side}_tower")(), str(weights))
        source = from_factory(
            f"foreign.towers:{side}_tower", weights, task=f"{side}_embedding", name=f"mine-{side}", **parts
        )
        options = ExportOptions(store=tmp_path / "store", precisions=(Precision.FP32,))
        manifests.append(export(source, options).manifest)
    first, second = (manifest.embedding for manifest in manifests)
    assert first is not None
    assert second is not None
    assert first.space == second.space
    assert (first.dimension, first.pooling, second.pooling) == (16, "patches", "mean")
    with pytest.raises(SourceError, match=r"its space is wrong \(name: .*; scale: .*\)"):
        from_factory(
            "foreign.towers:nameless",
            tmp_path / "image.safetensors",
            task="image_embedding",
            name="mine",
            image_preprocessing=preprocessing,
        )
