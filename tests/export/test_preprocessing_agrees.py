"""An image or audio reaches the model as it did in training: the server's preprocessing against the training's."""

import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from real_data import REAL

from headway_server.bundles import AudioPreprocessing, ImagePreprocessing
from headway_server.preprocessing.audio import LogMel
from headway_server.preprocessing.image import ImageLimits, ImagePreprocessor
from headway_training.checkpoint import AudioPreprocessing as AudioTrainingPreprocessing
from headway_training.checkpoint import ImagePreprocessing as TrainingPreprocessing
from headway_training.data import audio
from headway_training.data.images import normalize, resize_and_crop

SETTINGS = [
    {"height": 32, "width": 32, "resize": "stretch", "interpolation": "bicubic"},
    {"height": 24, "width": 40, "resize": "stretch", "interpolation": "bilinear"},
    {"height": 48, "width": 32, "resize": "shorter_side", "resize_size": 56, "interpolation": "bicubic"},
]
SCALE = {"mean": (0.5, 0.4, 0.3), "std": (0.25, 0.2, 0.3)}
ONE_GREY_LEVEL = 1 / 255 / 0.2 + 1e-6


def _photographs() -> list[Path]:
    return sorted(file for file in (REAL / "photos").glob("*") if file.suffix in (".png", ".jpg"))


def _drawn() -> dict[str, bytes]:
    """Pictures of the kinds that decoders treat apart."""
    generator = np.random.default_rng(0)
    colours = Image.fromarray(generator.integers(0, 256, (61, 83, 3)).astype(np.uint8))
    turned = Image.Exif()
    turned[0x0112] = 6
    see_through = colours.convert("RGBA")
    see_through.putalpha(Image.fromarray(generator.integers(0, 256, (61, 83)).astype(np.uint8)))
    deep = Image.fromarray(generator.integers(0, 65_536, (61, 83)).astype(np.uint16))
    pictures = {
        "grey.png": (colours.convert("L"), {}),
        "palette.png": (colours.convert("P"), {}),
        "see-through.png": (see_through, {}),
        "deep.png": (deep, {}),
        "deep-with-a-hole.png": (deep, {"transparency": int(np.asarray(deep)[30, 40])}),
        "ink.png": (colours.convert("1"), {}),
        "half-grey.png": (see_through.convert("LA"), {}),
        "holes.png": (see_through.quantize(16), {}),
        "see-through.webp": (see_through, {"lossless": True, "exif": turned}),
        "print.jpg": (colours.convert("CMYK"), {}),
        "turned.jpg": (colours, {"exif": turned}),
        "still.gif": (colours, {}),
        "plain.bmp": (colours, {}),
        "plain.webp": (colours, {"lossless": True}),
    }
    files = {}
    for name, (picture, options) in pictures.items():
        file = io.BytesIO()
        picture.save(file, {"jpg": "JPEG"}.get(name[-3:], name.rpartition(".")[2].upper()), **options)
        files[name] = file.getvalue()
    return files


def _largest_difference(data: bytes, settings: dict) -> float:
    limits = ImageLimits(max_bytes=2**24, max_pixels=2**26)
    served = ImagePreprocessor(ImagePreprocessing(**settings, **SCALE), limits).prepare(data).pixel_values
    with Image.open(io.BytesIO(data)) as image:
        wanted = TrainingPreprocessing(**settings, **SCALE)
        trained = normalize(resize_and_crop(image, wanted)[None], wanted)[0]
    assert served.shape == trained.shape
    return float(np.abs(served - trained).max())


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("name", _drawn())
def test_drawn_pictures_agree_with_training(name, settings):
    assert _largest_difference(_drawn()[name], settings) <= ONE_GREY_LEVEL


@pytest.mark.skipif(not _photographs(), reason="no photographs: set HEADWAY_DATA_DIR to the data sets")
@pytest.mark.parametrize("settings", SETTINGS)
def test_photographs_agree_with_training(settings):
    for file in _photographs():
        assert _largest_difference(file.read_bytes(), settings) <= ONE_GREY_LEVEL, file.name


@pytest.mark.parametrize("sizes", [(8000, 64, 256, 80, 100, 4000.0), (16_000, 80, 400, 160, 50, 8000.0)])
def test_audio_reaches_the_model_as_in_training(sizes):
    names = ("sampling_rate", "num_mel_bins", "fft_size", "hop_length", "num_frames", "max_frequency")
    settings = dict(zip(names, sizes, strict=True))
    generator = np.random.default_rng(0)
    recording = (generator.normal(size=5001) * np.geomspace(10_000, 1, 5001)).astype(np.int16)
    trained = audio.LogMel(AudioTrainingPreprocessing(**settings)).of_recording(recording).numpy()
    served = LogMel(AudioPreprocessing(**settings)).features(recording.astype(np.float32) / 32_768)
    assert trained.shape == served.shape
    assert np.abs(trained - served).max() < 1e-5
