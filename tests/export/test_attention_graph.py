"""The graph of the attention weights: against PyTorch, in each precision, and where there can be none."""

import dataclasses
from pathlib import Path

import numpy as np
import onnx
import pytest
import tiny_vision
import torch
import transformers

from headway_export import parity
from headway_export.candidate import Candidate
from headway_export.errors import ParityError, SourceError
from headway_export.exporter import ExportOptions, export
from headway_export.graphs import StatelessAttentionGraph
from headway_export.huggingface import FolderOptions, from_folder
from headway_export.reference import Reference
from headway_export.source import from_checkpoint
from headway_export.tracing import TracedModel, trace
from headway_server.batching import BatchGraph
from headway_server.bundles import Precision, Task, attention_layers, open_bundle
from headway_server.runtime import Runtime
from headway_training.models import build_model
from headway_training.models.parts.attention import scaled_dot_product_attention

NAMES = {
    "generation": "tiny-generation",
    "translation": "tiny-translation",
    "text_classification": "tiny-classification",
    "token_classification": "tiny-tokens",
    "image_classification": "tiny-images",
}
KINDS = {
    "generation": {"attention": 2},
    "translation": {"encoder_attention": 1, "decoder_attention": 2, "cross_attention": 2},
    "text_classification": {"attention": 2},
    "token_classification": {"attention": 1},
    "image_classification": {"attention": 2},
}


@pytest.fixture(scope="module")
def runtime():
    return Runtime(device="cpu", num_threads=1)


@pytest.fixture
def opened(tiny_store, tiny_checkpoints, runtime):
    """Opens the graph of a task: `opened(task)` gives the graph, the bundle's variant and the module."""

    def opened(task, precision=Precision.FP32):
        bundle = open_bundle(tiny_store / NAMES[task] / "1")
        variant = bundle.manifest.variants[precision]
        return BatchGraph(runtime.open(bundle, variant.graphs["attention"])), variant, tiny_checkpoints[task]

    return opened


def run(graph, items):
    return graph.split(graph.session.run(graph.collate(items)), items)


def einsum_kernel(found):
    """A kernel in Einstein's notation, which notes its weights."""

    def kernel(query, key, value, mask=None, *, causal=False, bias=None, scale=None):
        assert bias is None, "of no tiny model"
        assert scale is None, "of no tiny model"
        scores = torch.einsum("bthk,bshk->bhts", query, key) / query.shape[-1] ** 0.5
        if causal:
            mask = torch.ones(query.shape[1], key.shape[1], dtype=torch.bool).tril()
        if mask is not None:
            scores = scores.masked_fill(~mask, -torch.inf)
        found.append(scores.softmax(-1))
        return torch.einsum("bhts,bshk->bthk", found[-1], value)

    return kernel


def as_item(**arrays):
    return {name: np.asarray(array, np.int64) for name, array in arrays.items()}


@pytest.mark.parametrize("task", NAMES)
def test_every_layer_of_every_kind_is_an_output_and_the_proof_stands_in_the_manifest(opened, task):
    for precision, bound in ((Precision.FP32, 1e-4), (Precision.INT8, None)):
        _, variant, _ = opened(task, precision)
        layers = attention_layers(variant.graphs["attention"].outputs)
        assert {kind: len(specs) for kind, specs in layers.items()} == KINDS[task]
        assert variant.attention.bound == bound
        assert variant.attention.max_weight_error < (bound or 0.1)
        assert variant.attention.max_row_sum_error < 1e-6
        assert variant.attention.checked_shape_count >= 3


def encoder_weights(module, text):
    """The weights of each layer of a classifier of texts or tokens."""
    found = []
    module.kernel = einsum_kernel(found)
    with torch.inference_mode():
        module(torch.tensor([text]), torch.ones(1, len(text), dtype=torch.int64))
    return {f"attention_{layer}": weights[0].numpy() for layer, weights in enumerate(found)}


def decoder_weights(module, text):
    """The weights of each layer of a generation model."""
    found = []
    kernel = einsum_kernel(found)
    with torch.inference_mode():
        positions = torch.arange(len(text))[None]
        module.hidden_states(torch.tensor([text]), positions, lambda *qkv, **_: kernel(*qkv, causal=True))
    return {f"attention_{layer}": weights[0].numpy() for layer, weights in enumerate(found)}


def translation_weights(module, source, target):
    """The weights of each layer of each kind of a translation model."""
    encoder, decoder, cross = [], [], []
    decode, attend_cross = einsum_kernel(decoder), einsum_kernel(cross)
    module.kernel = einsum_kernel(encoder)
    ids = torch.tensor([source])
    with torch.inference_mode():
        keys_values = module.cross_keys_values(module.encode(ids, torch.ones_like(ids)))
        module.decode(
            torch.tensor([target]),
            torch.arange(len(target))[None],
            lambda *qkv, **_: decode(*qkv, causal=True),
            lambda query, layer, **_: attend_cross(query, *keys_values[layer]),
        )
    found = {"encoder": encoder, "decoder": decoder, "cross": cross}
    return {
        f"{kind}_attention_{layer}": weights[0].numpy()
        for kind, layers in found.items()
        for layer, weights in enumerate(layers)
    }


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    for name, weights in expected.items():
        np.testing.assert_allclose(found[name], weights, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("task", ["text_classification", "token_classification"])
def test_weights_of_texts_are_those_of_the_models_own_layers_whatever_stands_beside_them(opened, task):
    graph, _, checkpoint = opened(task)
    module = from_checkpoint(checkpoint).module
    texts = [[1, 4, 9, 5, 7], [1, 8], [1, 3, 3, 4, 6, 7, 8]]
    items = [as_item(input_ids=text, attention_mask=np.ones(len(text))) for text in texts]
    for text, weights in zip(texts, run(graph, items), strict=True):
        assert_equal(weights, encoder_weights(module, text))


def test_a_token_of_a_generation_model_attends_to_none_after_it(opened):
    graph, _, checkpoint = opened("generation")
    module = from_checkpoint(checkpoint).module
    texts = [[3, 1, 4, 1, 5], [9, 2, 6]]
    for text, weights in zip(texts, run(graph, [as_item(input_ids=text) for text in texts]), strict=True):
        assert_equal(weights, decoder_weights(module, text))
        assert all((np.triu(layer, 1) == 0).all() for layer in weights.values())


def test_all_three_kinds_of_a_translation_model_are_those_of_its_own_layers(opened):
    graph, _, checkpoint = opened("translation")
    module = from_checkpoint(checkpoint).module
    pairs = [([5, 6, 7, 2], [1, 16, 15]), ([8, 2], [1, 17, 18, 14, 15])]
    items = [as_item(input_ids=source, attention_mask=[1] * len(source), target_ids=target) for source, target in pairs]
    for (source, target), weights in zip(pairs, run(graph, items), strict=True):
        assert_equal(weights, translation_weights(module, source, target))


def _contents(path: Path) -> bytes:
    """A graph with its weights, wherever they are."""
    model = onnx.load(path)
    for weight in model.graph.initializer:
        weight.ClearField("data_location")
        weight.ClearField("external_data")
    return model.SerializeToString(deterministic=True)


def test_the_serving_graphs_are_the_same_with_and_without_the_graph_of_weights(tiny_store, tiny_checkpoints, tmp_path):
    options = ExportOptions(store=tmp_path, precisions=(Precision.FP32,))
    without = export(from_checkpoint(tiny_checkpoints["image_classification"]), options)
    with_it = open_bundle(tiny_store / "tiny-images" / "1")
    assert _contents(without.file("fp32/model.onnx")) == _contents(with_it.file("fp32/model.onnx"))
    assert "fp32/attention.onnx" not in without.manifest.files
    assert without.manifest.variants[Precision.FP32].attention is None
    assert (without.manifest.patches, with_it.manifest.patches.rows) == (None, 4)
    assert with_it.manifest.patches.has_class_token
    asked = dataclasses.replace(from_checkpoint(tiny_checkpoints["image_classification"]), attention=True)
    for version, given in (("2", None), ("3", False)):
        written = export(asked, dataclasses.replace(options, version=version, attention=given))
        assert ("fp32/attention.onnx" in written.manifest.files) == (given is None)


def test_weights_that_are_not_pytorchs_are_refused(tiny_store, tiny_checkpoints, runtime, monkeypatch):
    source = from_checkpoint(tiny_checkpoints["text_classification"])
    bundle = open_bundle(tiny_store / "tiny-classification" / "1")
    candidate = Candidate(
        source=source,
        bundle=bundle,
        precision=Precision.FP32,
        variant=bundle.manifest.variants[Precision.FP32],
        runtime=runtime,
    )
    reference = Reference(source)
    assert parity.check_attention(candidate, reference).max_weight_error < 1e-4
    other = Reference(source)
    with torch.no_grad():
        other.module.stack.layers[0].attention.query_key_value.weight.mul_(1.01)
    with pytest.raises(ParityError, match=r"attention_\d of .* from PyTorch's weights, bound 1e-04"):
        parity.check_attention(candidate, other)
    exact = Reference.attention_weights

    def twice(self, inputs):
        return {name: 2 * weights for name, weights in exact(self, inputs).items()}

    monkeypatch.setattr(Reference, "attention_weights", twice)
    with pytest.raises(ParityError, match="from PyTorch's weights"):
        parity.check_attention(candidate, reference)


def test_models_without_attention_to_show_are_refused_with_the_reason(monkeypatch):
    # Their serving graphs are traced first; those of a recurrent model take longest, and other tests trace them.
    monkeypatch.setattr("headway_export.tasks.text_to_text.trace_recurrent", lambda _: TracedModel(graphs=()))
    shape = {"vocabulary_size": 20, "max_source_length": 8, "max_target_length": 8}
    recurrent = build_model("recurrent", {**shape, "d_embedding": 8, "d_state": 8, "d_attention": 8}).eval()
    with pytest.raises(SourceError, match="recurrent state in place of attention"):
        trace(recurrent, Task.TRANSLATION, attention=True)

    class Mean(torch.nn.Module):
        max_length = 8

        def __init__(self):
            super().__init__()
            self.table = torch.nn.Embedding(20, 4)

        def forward(self, input_ids, attention_mask):
            return (self.table(input_ids) * attention_mask[..., None]).mean(dim=1)

    model = Mean().eval()
    with pytest.raises(SourceError, match="has no attribute kernel"):
        trace(model, Task.TEXT_CLASSIFICATION, attention=True)
    model.kernel = scaled_dot_product_attention
    with pytest.raises(SourceError, match="never called its kernel"):
        trace(model, Task.TEXT_CLASSIFICATION, attention=True)


@pytest.mark.parametrize("family", ["vit", "dinov2_with_registers", "deit", "dinov3_vit"])
def test_attention_of_transformers_is_without_registers(tmp_path, family):
    """Rows and columns are the class token and the patches, and what is left of a row sums to one."""
    folder = tiny_vision.write_vision_model(tmp_path / family, family, is_classifier=False)
    source, _ = from_folder(folder, FolderOptions(pooling="cls" if family == "deit" else None))
    pixels = torch.rand(2, 3, *source.image_preprocessing.largest)
    own = transformers.AutoModel.from_pretrained(folder, attn_implementation="eager").eval()
    with torch.inference_mode():
        found = StatelessAttentionGraph(source.module)(pixels)
        expected = own(pixel_values=pixels, output_attentions=True).attentions
    count = source.module.num_leading_registers
    kept = [0, *range(1 + count, expected[0].shape[-1])]
    for layer, weights in enumerate(expected):
        of_patches = weights[:, :, kept][..., kept]
        of_patches = of_patches / of_patches.sum(-1, keepdim=True)
        torch.testing.assert_close(found[f"attention_{layer}"], of_patches, rtol=0, atol=1e-6)
    assert len(found) == len(expected)


def test_attention_within_windows_is_refused(tmp_path):
    folder = tiny_vision.write_vision_model(tmp_path / "swin", "swin")
    source, _ = from_folder(folder, FolderOptions())
    with pytest.raises(SourceError, match="attends within windows"), torch.inference_mode():
        StatelessAttentionGraph(source.module)(torch.rand(1, 3, *source.image_preprocessing.largest))
