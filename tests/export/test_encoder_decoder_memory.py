"""An encoder-decoder is compared with its encoder, its decoder's cache and PyTorch in memory one after another."""

import mmap
import weakref

import numpy as np
import pytest

from headway_export import candidate, parity, quality, spool
from headway_export import reference as reference_model
from headway_export.candidate import Candidate, encode_sources
from headway_export.reference import Reference
from headway_export.source import from_checkpoint
from headway_export.spool import spooled, zeros_on_disk
from headway_export.tasks.table import task_of
from headway_server.bundles import Precision, open_bundle
from headway_server.decoding.runner.encoder import CrossTensors
from headway_server.runtime import Runtime

FIXTURES = {
    "translation": ("tiny_store", "tiny_checkpoints"),
    "captioning": ("captioner_store", "captioner_checkpoint"),
    "transcription": ("transcriber_store", "transcriber_checkpoint"),
}


@pytest.fixture(params=FIXTURES, ids=str)
def opened(request) -> Candidate:
    """The fp32 variant of a tiny model of each task."""
    store, checkpoint = map(request.getfixturevalue, FIXTURES[request.param])
    source = from_checkpoint(checkpoint[request.param] if isinstance(checkpoint, dict) else checkpoint)
    bundle = open_bundle(store / source.name / "1")
    variant, runtime = bundle.manifest.variants[Precision.FP32], Runtime(device="cpu", num_threads=1)
    return Candidate(source=source, bundle=bundle, precision=Precision.FP32, variant=variant, runtime=runtime)


def test_encoder_decoder_and_pytorch_take_memory_one_after_another(opened, monkeypatch):
    """With everything on disk that may be there; the figures are those of the export, which kept it in memory."""
    alive, calls = {"encoder": weakref.WeakSet(), "decoder": weakref.WeakSet()}, set()
    sources, num_encoded = set(), 0

    def noting(role, method):
        def call(self, *args, **kwargs):
            assert not any(alive.values()), f"{role} is opened beside {alive}"
            runner = method(self, *args, **kwargs)
            alive[role].add(runner)
            calls.add(role)
            return runner

        return call

    def asking(self, *args, answer=Reference.target_answers):
        assert not any(alive.values()), "PyTorch computes beside a runner"
        calls.add("PyTorch")
        sources.add(args[0].tobytes())
        return answer(self, *args)

    def encoding(*args, encode=reference_model._encoded):
        nonlocal num_encoded
        num_encoded += 1
        return encode(*args)

    monkeypatch.setattr(Candidate, "open_encoder", noting("encoder", Candidate.open_encoder))
    monkeypatch.setattr(Candidate, "open_decoder", noting("decoder", Candidate.open_decoder))
    monkeypatch.setattr(Reference, "target_answers", asking)
    monkeypatch.setattr(reference_model, "_encoded", encoding)
    monkeypatch.setattr(spool, "_LEAST_BYTES", 1)
    reference = Reference(opened.source, folder=opened.bundle.path)
    figures, before = parity.check(opened, reference), opened.variant.parity
    assert calls == {"encoder", "decoder", "PyTorch"}
    assert num_encoded == len(sources) + 1, "each source once, and the first once more, as it is asked again at the end"
    assert figures.greedy_token_count == before.greedy_token_count
    assert figures.checked_shape_count == before.checked_shape_count
    assert figures.max_relative_logit_error <= parity.LOGIT_BOUND


def test_the_metric_is_the_same_in_fewer_rows_at_a_time(opened, monkeypatch):
    bytes_of_row = _bytes_of_row(opened)
    monkeypatch.setattr(candidate, "_LEAST_ROW_BYTES", 2 * bytes_of_row)
    assert opened.affordable_rows(quality.NUM_ROWS) == max(2, min(quality.NUM_ROWS, _weights(opened) // bytes_of_row))
    monkeypatch.setattr(Candidate, "affordable_rows", lambda *_, **__: 3)
    data = opened.source.evaluation
    data = data.take(np.arange(min(len(data), 8)))
    in_three = task_of(opened.source.task).measure(opened, data).figure.value
    monkeypatch.undo()
    assert opened.affordable_rows(quality.NUM_ROWS) == quality.NUM_ROWS
    assert task_of(opened.source.task).measure(opened, data).figure.value == in_three


def _bytes_of_row(opened):
    """Of cache and packed source, as the runner counts them."""
    return opened.open_decoder(1).cache_bytes


def _weights(opened):
    return sum(parameter.nbytes for parameter in opened.source.module.parameters())


def test_what_is_large_is_read_from_disk(tmp_path):
    large = np.arange(1 << 19, dtype=np.float32).reshape(2, -1)
    arrays = {"large": large, "none": np.empty((0, 3), np.float32), "small": np.arange(3), "turned": large.T}
    found = spooled(arrays, tmp_path)
    assert list(found) == list(arrays)
    for name, array in arrays.items():
        np.testing.assert_array_equal(found[name], array)
        assert found[name].dtype == array.dtype
    assert isinstance(_owner(found["large"]), mmap.mmap)
    assert _owner(found["large"]) is _owner(found["turned"])
    assert not any(tmp_path.iterdir())
    zeros = zeros_on_disk(1 << 19, "float32", tmp_path)
    assert zeros.shape == (1 << 19,)
    assert not zeros.any()
    zeros[:2] = 3  # it is written to
    assert isinstance(_owner(zeros), mmap.mmap)
    assert not any(tmp_path.iterdir())
    few = {"small": np.arange(3)}
    assert spooled(few, tmp_path)["small"] is few["small"]


def _owner(array):
    while isinstance(array, np.ndarray):
        array = array.base
    return array.obj if isinstance(array, memoryview) else array


@pytest.mark.parametrize(("frames", "batches"), [(3000, [2] * 4), (200, [8])])
def test_long_windows_are_encoded_a_few_at_a_time(frames, batches, tmp_path):
    """Their attention scores are what an export of speech needs most memory for."""
    encoded = []

    class Encoder:
        def encode(self, inputs):
            encoded.append(len(inputs))
            return [CrossTensors(num_positions=1, tensors=dict(each.tensors)) for each in inputs]

    found = encode_sources(Encoder(), [np.full((4, frames), number, np.float32) for number in range(8)], tmp_path)
    assert encoded == batches
    assert [each.tensors["input_features"][0, 0] for each in found] == [*range(8)]
