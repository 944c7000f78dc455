"""What one scale for all rows costs the shipped models in quality, beside a scale a row.

    python -m benchmarks.static_scales [NAME ...]

The graphs are those of the bundles, which have a scale a row, and the same with fixed scales, for activations of more
and more noise. The metric is the export's, on the same data.
"""

import dataclasses
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from tokenizers import Tokenizer
from torch import nn

from headway_export import quality
from headway_export.activations import noise_growth, row_maxima
from headway_export.candidate import Candidate
from headway_export.exporter import NOISE_GROWTHS
from headway_export.inputs import NUM_CALIBRATED, hold_out, of_evaluation
from headway_export.rewriting import FixScales, rewrite, scaled_products
from headway_export.source import EvaluationData, ExportSource
from headway_export.tracing import TracedGraph, TracedModel
from headway_server.bundles import TOKENIZER_FILE, Bundle, Precision, open_bundle
from headway_server.runtime import Runtime
from headway_training.data.examples import LabeledImages, LabeledTexts, ParallelTexts, PlainText, SpanLabeledTexts
from headway_training.data.sources import data_folder, read_splits
from headway_training.recipes import read_recipe

_MODELS = Path(__file__).parents[1] / "models"
_RECIPES = {"shakespeare": "tiny-shakespeare"}
"""Of models whose recipe has another name."""


def source_of(bundle: Bundle) -> ExportSource:
    """Returns what a bundle was exported from, without the module."""
    manifest = bundle.manifest
    shared = {field.name for field in dataclasses.fields(ExportSource)} & set(type(manifest).model_fields)
    tokenizer = bundle.path / TOKENIZER_FILE
    return ExportSource(
        module=nn.Module(),
        make_reference=nn.Module,
        tokenizer=Tokenizer.from_file(str(tokenizer)) if tokenizer.is_file() else None,
        evaluation=_evaluation(bundle),
        **{name: getattr(manifest, name) for name in shared},
    )


def _evaluation(bundle: Bundle) -> EvaluationData:
    """Reads the data that a bundle's figures are of."""
    figure = bundle.manifest.variants[Precision.INT8].quality
    assert figure is not None, "shipped models have figures"
    splits = read_splits(read_recipe(_RECIPES.get(bundle.manifest.name, bundle.manifest.name)), data_folder(None), None)
    examples: dict[str, Any]
    match splits.test:
        case ParallelTexts(sources=sources, targets=targets):
            examples = {"texts": sources, "references": targets}
        case PlainText(text=text):
            examples = {"texts": [text]}
        case LabeledTexts(texts=texts, labels=labels):
            examples = {"texts": texts, "labels": np.array(labels)}
        case LabeledImages(images=images, labels=labels):
            examples = {"images": images, "labels": labels}
        case SpanLabeledTexts(texts=texts, spans=spans):
            named = [[(start, end, splits.labels[label]) for start, end, label in row] for row in spans]
            examples = {"texts": texts, "spans": named}
    return EvaluationData(
        dataset=figure.dataset, metric=figure.metric, higher_is_better=figure.higher_is_better, **examples
    )


def measure(name: str, folder: Path) -> None:
    """Prints a model's metric, with more and more scales fixed."""
    bundle = open_bundle(_MODELS / name / "1")
    variant = bundle.manifest.variants[Precision.INT8]
    source, held_out = hold_out(source_of(bundle))
    assert source.evaluation is not None, "it has been read"
    roles = [role for role in ("encoder", "decoder", "model") if role in variant.graphs]
    graphs = [TracedGraph(role=role, model=ir.load(bundle.file(variant.graphs[role].file))) for role in roles]
    traced = TracedModel(graphs=tuple(graphs), state=variant.state, cross=variant.cross)
    maxima = row_maxima(source, traced, of_evaluation(source, held_out or source.evaluation, NUM_CALIBRATED))
    runtime = Runtime(device="cpu", num_threads=1, num_lanes=1)
    for most in (0.0, *sorted(NOISE_GROWTHS)):
        num_fixed = num_products = 0
        files = {}
        for graph in graphs:
            rows = maxima[graph.role]
            reaches = {key: float(found.max()) for key, found in rows.items() if noise_growth(found) <= most}
            names = [product.activation.name for product in scaled_products(graph.model.graph)]
            num_products, num_fixed = num_products + len(names), num_fixed + sum(name in reaches for name in names)
            model = graph.model.clone()
            rewrite(model, FixScales(reaches))
            path = folder / f"{graph.role}.onnx"
            ir.save(model, path)
            files[graph.role] = variant.graphs[graph.role].model_copy(update={"file": path.name})
        candidate = Candidate(
            source=source,
            bundle=Bundle(path=folder, manifest=bundle.manifest),
            precision=Precision.INT8_STATIC,
            variant=variant.model_copy(update={"graphs": files}),
            runtime=runtime,
        )
        measured = quality.measure(candidate)
        assert measured is not None, "there is evaluation data"
        value = f"{measured.figure.metric} {measured.figure.value:.4f}"
        fixed = f"{num_fixed} of {num_products} products fixed"
        sys.stdout.write(f"{name}: noise up to {most:g} times, {fixed}: {value}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    shipped = sorted(folder.name for folder in _MODELS.iterdir())
    for model_name in sys.argv[1:] or shipped:
        with tempfile.TemporaryDirectory() as temporary:
            measure(model_name, Path(temporary))
