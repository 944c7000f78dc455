"""Proves shipped bundles again, whose checkpoints are gone: python docs/journal/shipped_proof.py [NAME]...

The weights of an int8 bundle are read back: the model is built by the manifest's configuration, with weights drawn at
random, and taken through tracing and quantization. Where its graphs have a weight, the shipped graphs have the trained
one in the same place, as codes and scales or as it was. What they stand for becomes a module, which is exported: its
fp32 graphs are held against a second such module, and its int8 graphs must have the codes of the shipped ones.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import onnx_ir as ir
import torch
import typer
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch import nn

from headway_export.exporter import ExportOptions, _Prover, export
from headway_export.rewriting import quantize_matrix
from headway_export.source import EvaluationData, ExportSource, limits_of
from headway_server.bundles import TOKENIZER_FILE, VOICES_FILE, Bundle, Precision, Task, find_bundles, open_bundle
from headway_training.models import CLIP, build_model

_MODELS = Path(__file__).parents[2] / "models"
_LEVELS = {128: 127, 40: 215, 0: 255}
"""Levels of an activation above zero, by the level of zero: scales of weights are divided by them in a graph."""


def main(
    names: Annotated[list[str] | None, typer.Argument()] = None,
    store: Annotated[Path, typer.Option(help="Folder of the bundles.")] = _MODELS,
) -> None:
    """Prints a line of figures for each bundle."""
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    for path in find_bundles(store):
        bundle = open_bundle(path)
        if not names or bundle.manifest.name in names:
            _prove(bundle)


def _prove(bundle: Bundle) -> None:
    began, name = time.perf_counter(), bundle.manifest.name
    weights = _read_back(bundle)

    def make() -> nn.Module:
        module = _drawn(bundle)
        with torch.no_grad():
            for tensor_name, tensor in _tensors(module):
                if tensor_name in weights:
                    tensor.copy_(torch.from_numpy(weights[tensor_name]))
        return module

    with tempfile.TemporaryDirectory() as folder:
        options = ExportOptions(store=Path(folder), precisions=(Precision.FP32, Precision.INT8))
        proved = export(_source_of(bundle, make), options)
        same, other = _compare_codes(bundle, proved)
        fp32, int8 = (proved.manifest.variants[precision] for precision in options.precisions)
        figures = {
            "name": name,
            "fp32_error": float(f"{fp32.parity.max_relative_logit_error:.2e}"),
            "positions": fp32.parity.greedy_token_count,
            "mismatches": fp32.parity.greedy_mismatch_count,
            "int8_error": float(f"{int8.parity.max_relative_logit_error:.2e}"),
            "agreement": int8.agreement.figures if int8.agreement else None,
            "weights_read_back": len(weights),
            "weights_in_no_graph": [name for name, _ in make().named_parameters() if name not in weights],
            "int8_matrices_as_shipped": same,
            "others": other,
            "seconds": round(time.perf_counter() - began, 1),
        }
    print(json.dumps(figures), flush=True)  # noqa: T201 (what the script is for)


def _drawn(bundle: Bundle, seed: int = 0) -> nn.Module:
    """Builds the model of a bundle with weights that are all different, so that none is taken for another."""
    architecture = bundle.manifest.architecture
    torch.manual_seed(seed)
    module = build_model(architecture.kind, dict(architecture.configuration))
    if isinstance(module, CLIP):
        module = module.image_tower if bundle.manifest.task is Task.IMAGE_EMBEDDING else module.text_tower
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(std=0.1)
    return module.float().eval()


def _tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


def _read_back(bundle: Bundle) -> dict[str, NDArray[np.float32]]:
    """Returns the trained weights by their names in the module; what training alone needs is in no graph."""
    module = _drawn(bundle)
    source = _source_of(bundle, lambda: _drawn(bundle))
    found: dict[str, NDArray[np.float32]] = {}
    with tempfile.TemporaryDirectory() as folder:
        options = ExportOptions(store=Path(folder), precisions=(Precision.FP32, Precision.INT8), cache="fp32")
        prover = _Prover(dataclasses.replace(source, module=module), Path(folder), options, lambda _: None)
        traced = prover._trace(module)  # noqa: SLF001 (the way that an export goes)
        for graph in prover._quantize(traced, Precision.INT8).graphs:  # noqa: SLF001
            shipped = ir.load(bundle.file(bundle.manifest.variants[Precision.INT8].graphs[graph.role].file))
            places = {_key(array): place for place, array in _weights_of(graph.model)}
            trained = dict(_weights_of(shipped))
            for name, tensor in _tensors(module):
                if (
                    name not in found
                    and (weight := _find(tensor.detach().numpy(), places, trained, shipped)) is not None
                ):
                    found[name] = weight
    return found


def _weights_of(model: ir.Model) -> Iterator[tuple[str, NDArray[Any]]]:
    """Yields what a graph holds by its place: a name, or for matrices of codes their number in the order of use."""
    number = 0
    for node in model.graph:
        for value in node.inputs:
            if value is None or value.const_value is None:
                continue
            array = value.const_value.numpy()
            is_first = next(iter(value.consumers())) is node
            if array.dtype == np.int8 and array.ndim == 2 and is_first:
                yield f"codes {number}", array
                number += 1
            elif array.dtype == np.float32:
                yield str(value.name).removeprefix("traced."), array


def _key(array: NDArray[Any]) -> tuple[str, tuple[int, ...], bytes]:
    return str(array.dtype), array.shape, np.ascontiguousarray(array).tobytes()


def _find(
    drawn: NDArray[np.float32],
    places: dict[Any, str],
    trained: dict[str, NDArray[Any]],
    shipped: ir.Model,
) -> NDArray[np.float32] | None:
    """Returns the trained weight that is where a drawn one is; None if the drawn one is nowhere.

    Args:
        drawn: The weight.
        places: Where the graph of the drawn model has what, by content.
        trained: What the shipped graph has, by place.
        shipped: The graph.
    """
    for transposed in (False, True) if drawn.ndim == 2 else (False,):
        laid = np.ascontiguousarray(drawn.T if transposed else drawn)
        weight: NDArray[np.float32] | None = None
        if (place := places.get(_key(laid))) is not None:
            weight = trained[place] if place in trained else _only_of_shape(laid.shape, places, trained)
        for axis in (0, 1) if laid.ndim == 2 and weight is None else ():
            if (place := places.get(_key(quantize_matrix(laid, axis=axis)[0]))) is not None:
                codes = trained[place]
                scale = _scale_of(shipped, codes)
                weight = codes * (scale[:, np.newaxis] if axis else scale)
        if weight is not None:
            assert weight.shape == laid.shape, "it is in the same place"
            return np.asarray(weight.T if transposed else weight, np.float32).copy()
    return None


def _only_of_shape(
    shape: tuple[int, ...], places: dict[Any, str], trained: dict[str, NDArray[Any]]
) -> NDArray[np.float32]:
    """Returns the shipped weight of a shape whose name is another than it would be today: there must be but one."""
    known = set(places.values())
    (weight,) = (array for place, array in trained.items() if place not in known and array.shape == shape)
    return weight


def _scale_of(model: ir.Model, codes: NDArray[np.int8]) -> NDArray[np.float32]:
    """Returns the scales of a matrix of codes, by what reads it."""
    values = (
        value for node in model.graph for value in node.inputs if value is not None and value.const_value is not None
    )
    (value, *_) = (one for one in values if one.const_value.shape.numpy() == codes.shape and _is(one, codes))
    for reader in value.consumers():
        if reader.op_type == "Gather":
            by_scale = _reader(_reader(reader))  # after the cast
            scales = by_scale.inputs[1].producer().inputs[0].producer().inputs[0]
            return scales.const_value.numpy()
        product = _reader(reader) if reader.op_type == "Transpose" else reader
        if product.op_type == "MatMulIntegerToFloat":
            factors, zero = product.inputs[3], product.inputs[4]
        else:
            factors, zero = _reader(_reader(product)).inputs[1], product.inputs[2]
        return factors.const_value.numpy() * np.float32(_LEVELS[int(zero.const_value.numpy())])
    raise ValueError("a matrix of codes that nothing reads")


def _is(value: ir.Value, codes: NDArray[np.int8]) -> bool:
    assert value.const_value is not None, "the caller has looked"
    array = value.const_value.numpy()
    return array.dtype == np.int8 and np.array_equal(array, codes)


def _reader(node: ir.Node) -> ir.Node:
    (reader,) = node.outputs[0].consumers()
    return reader


def _source_of(bundle: Bundle, make: Any) -> ExportSource:
    """Describes what is exported as the manifest does, without evaluation data where that can be."""
    manifest = bundle.manifest
    shared = {field.name for field in dataclasses.fields(ExportSource)} & set(type(manifest).model_fields)
    tokenizer = bundle.path / TOKENIZER_FILE
    module = make()
    fields: dict[str, Any] = {name: getattr(manifest, name) for name in shared}
    fields["limits"] = limits_of(module, manifest.task)
    if manifest.embedding is not None:
        fields |= {"space": manifest.embedding.space}
    return ExportSource(
        module=module,
        make_reference=make,
        tokenizer=Tokenizer.from_file(str(tokenizer)) if tokenizer.is_file() else None,
        evaluation=_evaluation(bundle),
        documents={VOICES_FILE: bundle.file(VOICES_FILE).read_bytes()} if VOICES_FILE in manifest.files else {},
        **fields,
    )


def _evaluation(bundle: Bundle) -> EvaluationData | None:
    """Returns drawn data for the tasks that are exported with some alone."""
    manifest, random = bundle.manifest, np.random.default_rng(0)
    if manifest.task is Task.IMAGE_GENERATION:
        image = manifest.image_preprocessing
        assert image is not None, "it draws images"
        shape = (64, image.height, image.width, 3)
        images, labels = random.integers(0, 256, shape).astype(np.uint8), random.integers(0, len(manifest.labels), 64)
        return EvaluationData(
            dataset="drawn", metric="velocity_error", higher_is_better=False, images=images, labels=labels
        )
    if manifest.task is Task.SPEECH_SYNTHESIS:
        codec = manifest.codec
        assert codec is not None, "it speaks"
        last = codec.first_code + codec.num_books * codec.codebook_size
        sequences = [
            np.append(random.integers(3, codec.first_code, 40), random.integers(codec.first_code, last, 200))
            for _ in range(16)
        ]
        return EvaluationData(
            dataset="drawn",
            metric="nats_per_code",
            higher_is_better=False,
            sequences=sequences,
            prompt_lengths=[40] * 16,
        )
    return None


def _compare_codes(shipped: Bundle, proved: Bundle) -> tuple[int, list[str]]:
    """Returns how many int8 matrices of the shipped graphs are those of the new ones, and the names of others."""
    same, other = 0, []
    new = proved.manifest.variants[Precision.INT8].graphs
    for role, graph in shipped.manifest.variants[Precision.INT8].graphs.items():
        if role not in new:
            continue
        codes = {
            _key(array) for _, array in _weights_of(ir.load(proved.file(new[role].file))) if array.dtype == np.int8
        }
        for place, array in _weights_of(ir.load(shipped.file(graph.file))):
            if array.dtype != np.int8:
                continue
            if _key(array) in codes:
                same += 1
            else:
                other.append(f"{role}: {place}")
    return same, other


if __name__ == "__main__":
    typer.run(main)
