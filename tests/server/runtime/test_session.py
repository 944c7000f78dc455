"""The device, the variant that runs on it, and what a graph must be."""

from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto, helper

from headway_server.bundles import Bundle, Graph, Precision, Task, TensorSpec, Variant, open_bundle
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
    assert Runtime(device="cpu").choose_variant(every, None)[0] in (Precision.INT8_STATIC, Precision.FP32)
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


WIDTH = 4096


def with_weights_beside(bundle: Bundle, folder: Path, location: str) -> tuple[Bundle, Graph]:
    """A bundle in another folder, with a graph that adds weights of a file that it names."""
    weights = TensorProto(name="weights", data_type=TensorProto.FLOAT, dims=[WIDTH])
    weights.data_location = TensorProto.EXTERNAL
    weights.external_data.add(key="location", value=location)
    inputs, outputs = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [WIDTH]) for name in ("x", "y"))
    graph = helper.make_graph([helper.make_node("Add", ["x", "weights"], ["y"])], "g", [inputs], [outputs], [weights])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    (folder / "model.onnx").write_bytes(model.SerializeToString())
    specs = [TensorSpec(name=name, dtype="float32", shape=(WIDTH,)) for name in ("x", "y")]
    return Bundle(path=folder, manifest=bundle.manifest), Graph(
        file="model.onnx", inputs=tuple(specs[:1]), outputs=tuple(specs[1:])
    )


def test_weights_beside_a_graph_may_be_overwritten_while_it_is_served(bundle, tmp_path):
    """A file that were mapped would end the process here."""
    (tmp_path / "model.onnx.data").write_bytes(np.arange(WIDTH, dtype=np.float32).tobytes())
    opened = Runtime(device="cpu").open(*with_weights_beside(bundle, tmp_path, "model.onnx.data"))
    assert "model.onnx.data" not in Path("/proc/self/maps").read_text(encoding="utf-8")
    (tmp_path / "model.onnx.data").write_bytes(b"")
    assert opened.run({"x": np.zeros(WIDTH, np.float32)})["y"][-1] == WIDTH - 1


@pytest.mark.parametrize("location", ["../outside", "{folder}/outside", "below/../../outside", "link", "/dev/zero"])
def test_a_graph_that_names_a_file_outside_of_its_bundle_is_refused(bundle, tmp_path, location):
    (tmp_path / "outside").write_bytes(np.arange(WIDTH, dtype=np.float32).tobytes())
    (tmp_path / "bundle").mkdir()
    (tmp_path / "bundle" / "link").symlink_to(tmp_path / "outside")
    named = with_weights_beside(bundle, tmp_path / "bundle", location.format(folder=tmp_path))
    with pytest.raises(BundleError, match="External data path"):
        Runtime(device="cpu").open(*named)
