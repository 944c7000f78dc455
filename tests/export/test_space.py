"""Memory and disk that an export asks for, held against what exports took (docs/decisions/mapped-weights.md)."""

import pytest
import transformers

from headway_export import space
from headway_export.errors import SourceError
from headway_export.huggingface.folder import working_bytes_of
from headway_export.huggingface.image_generators import drawing_bytes
from headway_server.bundles import Precision, Task

GIB = 1 << 30
WHISPER = {"d_model": 512, "encoder_layers": 6, "encoder_attention_heads": 8, "vocab_size": 51865}
QWEN3 = {"num_attention_heads": 16, "vocab_size": 151_936, "max_position_embeddings": 40_960}
MEASURED = [
    # Of an export, without libraries: configuration, task, --max-length, weights in GiB, True if mapped, most in GiB.
    (transformers.WhisperConfig(**WHISPER), Task.TRANSCRIPTION, None, 0.27, False, 1.78),
    (transformers.BertConfig(), Task.TEXT_CLASSIFICATION, None, 0.41, False, 0.76),
    (transformers.ViTConfig(), Task.IMAGE_CLASSIFICATION, None, 0.32, False, 0.61),
    (transformers.GPT2Config(), Task.GENERATION, None, 0.46, False, 1.7),
    (transformers.Qwen3Config(**QWEN3), Task.GENERATION, 64, 0.81, True, 1.24),
    (transformers.LlamaConfig(num_attention_heads=16), Task.GENERATION, 1024, 0.77, True, 1.09),
]


@pytest.mark.parametrize("measured", MEASURED, ids=lambda case: f"{case[0].model_type}-{case[1]}")
def test_memory_is_asked_for_as_exports_took_it(measured, monkeypatch):
    config, task, max_length, weights, is_mapped, most = measured
    count, working = int(weights * GIB / 4), working_bytes_of(config, task, max_length)

    def is_refused(available: float) -> bool:
        monkeypatch.setattr(space, "available_bytes", lambda _: int(available * GIB))
        try:
            space.check_memory("model", count, working=working, is_mapped=is_mapped)
        except SourceError:
            return True
        return False

    assert is_refused(0.97 * most)
    assert not is_refused(2.0 * most)


def test_a_pipeline_asks_for_weights_and_the_pixels_of_an_image(monkeypatch):
    """Stable Diffusion 1.5: 3.97 GiB of weights, most 4.0 GiB of memory of its own beside those that are mapped."""
    autoencoder = {"block_out_channels": [128, 256, 512, 512]}
    working = drawing_bytes(autoencoder, 64)
    assert GIB < working < 1.5 * GIB
    assert drawing_bytes(autoencoder, 128) - working == pytest.approx(3 * GIB)
    monkeypatch.setattr(space, "available_bytes", lambda _: 8 * GIB)
    words = r"its 1,066,234,307 weights take 4.0 GiB .* 9.2 GiB, and 8.0 GiB of memory are free; export it on a larger"
    with pytest.raises(SourceError, match=words):
        space.check_memory("sd", 1_066_234_307, working=working, can_shrink=False)
    monkeypatch.setattr(space, "available_bytes", lambda _: 10 * GIB)
    space.check_memory("sd", 1_066_234_307, working=working)


def test_longer_texts_ask_for_more():
    config = transformers.LlamaConfig(num_attention_heads=32)
    short, long = (working_bytes_of(config, Task.GENERATION, length) for length in (64, 2048))
    assert short < GIB
    assert long > 3 * GIB
    assert working_bytes_of(config, Task.GENERATION, None) == long


def test_memory_that_texts_take_is_told(monkeypatch):
    monkeypatch.setattr(space, "available_bytes", lambda _: GIB)
    with pytest.raises(SourceError, match=r"about 0.5 times that and 4.0 GiB beside, 4.0 GiB, and 1.0 GiB of memory "):
        space.check_memory("model", 1 << 20, working=4 * GIB, is_mapped=True)
    with pytest.raises(SourceError, match="give a smaller --max-length, or export it on a larger machine"):
        space.check_memory("model", 1 << 20, working=4 * GIB, is_mapped=True)


def test_disk_is_asked_for_all_that_is_written():
    assert space.bundle_bytes(1000, (Precision.FP32, Precision.INT8)) == 5100
    assert space.bundle_bytes(1000, (Precision.INT8,)) == 5100, "fp32 judges"
    assert space.bundle_bytes(1000, (Precision.INT8,), writes_judge=False) == 1100


def test_a_disk_without_room_is_refused_by_numbers(tmp_path, monkeypatch):
    monkeypatch.setattr(space, "free_on_disk", lambda _: GIB)
    space.check_disk("model", tmp_path / "store", GIB)
    with pytest.raises(SourceError, match=r"model: needs about 2.0 GiB of disk .* and 1.0 GiB are free below .*store"):
        space.check_disk("model", tmp_path / "store", 2 * GIB)


def test_free_disk_is_that_of_the_folder_above_where_there_is_none_yet(tmp_path):
    assert space.free_on_disk(tmp_path / "not" / "there") > 0
