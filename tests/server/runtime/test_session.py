"""The device, the variant that runs on it, and what a graph must be."""

from pathlib import Path

import pytest

from headway_server.bundles import Bundle, Precision, Task, Variant, open_bundle
from headway_server.errors import BundleError, RuntimeUnavailableError
from headway_server.runtime import Runtime, session


@pytest.fixture
def bundle(classifier_store: Path) -> Bundle:
    return open_bundle(min(classifier_store.glob("*/*")))


def _decoder(bundle: Bundle, *precisions: Precision) -> Bundle:
    """The bundle as if it were a decoder with these variants; nothing runs it."""
    variant = next(iter(bundle.manifest.variants.values()))
    decoder = Variant.model_construct(**{**dict(variant), "graphs": {"decoder": variant.graphs["model"]}})
    manifest = bundle.manifest.model_copy(
        update={"task": Task.GENERATION, "variants": dict.fromkeys(precisions, decoder)}
    )
    return Bundle(path=bundle.path, manifest=manifest)


def _on_cuda(*, found: bool) -> Runtime:
    """A runtime that believes in CUDA: what it decides can be tested where there is none."""
    runtime = Runtime(device="cpu")
    runtime.device = "cuda"
    runtime._was_found = found
    return runtime


def test_cuda_that_is_not_there_is_an_error_that_says_what_to_do():
    with pytest.raises(RuntimeUnavailableError, match=r"--device cuda: .*start with --device cpu"):
        Runtime(device="cuda")


def test_the_fastest_variant_of_the_device_is_chosen(bundle):
    every = _decoder(bundle, *Precision).manifest
    assert Runtime(device="cpu").choose_variant(every, None)[0] in (Precision.INT8, Precision.FP32)
    assert _on_cuda(found=False).choose_variant(every, None)[0] is Precision.FP16


@pytest.mark.parametrize(("exact", "expected"), [(True, Precision.INT8), (False, Precision.FP32)])
def test_a_processor_that_overflows_in_int8_gets_fp32(bundle, monkeypatch, exact, expected):
    monkeypatch.setattr(session, "has_exact_int8", lambda: exact)
    manifest = _decoder(bundle, Precision.FP32, Precision.INT8).manifest
    assert Runtime(device="cpu").choose_variant(manifest, None)[0] is expected


def test_a_precision_that_the_bundle_lacks_is_an_error_that_names_what_it_has(bundle):
    manifest = _decoder(bundle, Precision.FP32, Precision.INT8).manifest
    with pytest.raises(RuntimeUnavailableError, match=r"has no fp16 variant \(it has fp32, int8\)"):
        Runtime(device="cpu").choose_variant(manifest, Precision.FP16)


@pytest.mark.parametrize("precision", [Precision.FP32, Precision.INT8])
def test_a_decoder_on_cuda_that_was_asked_for_must_be_fp16(bundle, precision):
    manifest = _decoder(bundle, precision).manifest
    with pytest.raises(RuntimeUnavailableError, match=r"export it .*with --precision fp16, or start .*--device cpu"):
        _on_cuda(found=False).choose_variant(manifest, precision)
    assert _on_cuda(found=False).suiting(manifest, None).device == "cuda"


def test_where_cuda_was_only_found_a_decoder_without_fp16_runs_on_the_cpu(bundle):
    runtime, manifest = _on_cuda(found=True), _decoder(bundle, Precision.INT8).manifest
    assert runtime.suiting(manifest, None).device == "cpu"
    assert runtime.suiting(manifest, None) is runtime.suiting(manifest, None), "bundles share its cores"
    assert _on_cuda(found=True).suiting(_decoder(bundle, Precision.FP16).manifest, None).device == "cuda"


def test_a_graph_with_other_tensors_than_declared_is_refused(bundle):
    variant = next(iter(bundle.manifest.variants.values()))
    graph = variant.graphs["model"]
    first, *others = graph.outputs
    renamed = graph.model_copy(update={"outputs": (first.model_copy(update={"name": "other"}), *others)})
    with pytest.raises(BundleError, match=r"has tensors .* the manifest declares \[.*'other'.*\]"):
        Runtime(device="cpu").open(bundle, renamed)
    retyped = graph.model_copy(update={"outputs": (first.model_copy(update={"dtype": "int32"}), *others)})
    with pytest.raises(BundleError, match="the manifest declares int32"):
        Runtime(device="cpu").open(bundle, retyped)
