"""The device, the variant that runs on it, and what a graph must be."""

from pathlib import Path

import pytest

from headway_server.bundles import Bundle, Precision, Variant, open_bundle
from headway_server.errors import BundleError, RuntimeUnavailableError
from headway_server.runtime import Runtime, processor, session


@pytest.fixture
def bundle(classifier_store: Path) -> Bundle:
    return open_bundle(min(classifier_store.glob("*/*")))


def _decoder(bundle: Bundle, *precisions: Precision) -> Bundle:
    """The bundle as if it were a decoder with these variants; nothing runs it."""
    variant = next(iter(bundle.manifest.variants.values()))
    decoder = Variant.model_construct(**{**dict(variant), "graphs": {"decoder": variant.graphs["model"]}})
    manifest = bundle.manifest.model_copy(
        update={"task": session.Task.GENERATION, "variants": dict.fromkeys(precisions, decoder)}
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


@pytest.fixture
def cgroup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty hierarchy of control groups, in which this process is `/services/headway`."""
    (tmp_path / "own").write_text("4:memory:/elsewhere\n3:cpu,cpuacct:/services/headway\n0::/services/headway\n")
    root = tmp_path / "groups"
    for folder in (root / "services" / "headway", root / "cpu" / "services" / "headway"):
        folder.mkdir(parents=True)
    monkeypatch.setattr(processor, "_CGROUP", root)
    monkeypatch.setattr(processor, "_CGROUP_OF_PROCESS", tmp_path / "own")
    return root


@pytest.mark.parametrize(("content", "expected"), [("max 100000", None), ("150000 100000", 1.5), ("50000 100000", 0.5)])
@pytest.mark.parametrize("group", [".", "services", "services/headway"])
def test_the_control_groups_quota_is_read_wherever_it_is_set(cgroup, group, content, expected):
    (cgroup / group / "cpu.max").write_text(content + "\n")
    assert processor._cgroup_quota() == expected
    assert 1 <= processor.usable_cores() <= (2 if expected else 10_000)


def test_the_least_quota_of_the_groups_counts(cgroup):
    for group, quota in ((".", "max"), ("services", "150000"), ("services/headway", "400000")):
        (cgroup / group / "cpu.max").write_text(f"{quota} 100000")
    assert processor._cgroup_quota() == 1.5
    assert "a quota of 1.5 by control group" in processor.describe_cores()


@pytest.mark.parametrize("group", [".", "services/headway"])
def test_the_first_versions_quota_is_read(cgroup, group):
    for name, value in (("cpu.cfs_quota_us", "300000"), ("cpu.cfs_period_us", "100000")):
        (cgroup / "cpu" / group / name).write_text(value)
    assert processor._cgroup_quota() == 3


def test_a_container_that_sees_its_hosts_group_names_reads_its_own_root(cgroup, tmp_path):
    (tmp_path / "own").write_text("0::/docker/0123456789abcdef\n")
    (cgroup / "cpu.max").write_text("200000 100000")
    assert processor._cgroup_quota() == 2


def test_without_control_groups_there_is_no_quota(cgroup, tmp_path):
    (tmp_path / "own").unlink()
    assert processor._cgroup_quota() is None
    assert "no quota by control group" in processor.describe_cores()
