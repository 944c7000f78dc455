"""A tiny run of every task of training, on data of its own: options of two steps, whose folders lie in one."""

import csv
import random
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import tiny_pictures
import tiny_transcriber
import tiny_tuning
import tiny_voice
from PIL import Image
from rich.console import Console
from tiny_segments import write_segment_data

from headway_training.data.sources import OwnData
from headway_training.run import RunOptions, run_training

RUN = ("tracker=none", "optimization.evaluations=1")
ROWS, TOKENS = "optimization.batch_size=8", "optimization.batch_tokens=128"
_LAYER = {"d_model": 16, "num_heads": 2, "d_ff": 32}
_TOWER = {"stem": '"patches"', "patch_size": 8, "image_num_layers": 1, "image_d_model": 16}
_TOWER |= {"image_num_heads": 2, "image_d_ff": 32}
_SQUARE = ("preprocessing.height=16", "preprocessing.width=16")
_AUTOENCODER = {"width": 8, "d_latent": 2}
_DENOISER = {"num_layers": 1, "patch_size": 2, **_LAYER}
_SPEAKER = {"max_length": 128, "history_frames": 5, "max_text_length": 24, "num_layers": 1, **_LAYER}


def _options(recipe: str, folder: Path, model: Mapping[str, object], *more: str, **options: object) -> RunOptions:
    settings = (*(f"model.{name}={value}" for name, value in model.items()), *RUN, *more)
    return RunOptions(recipe=recipe, settings=settings, output=folder / "run", max_steps=2, **options)  # type: ignore[arg-type]


def _own(data: Path) -> OwnData:
    return OwnData(train=str(data), valid=str(data))


def _write(file: Path, lines: list[str]) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return file


def write_texts(folder: Path) -> Path:
    """A CSV file of 40 texts that a word gives away."""
    generator = random.Random(0)
    file = folder / "texts.csv"
    folder.mkdir(parents=True, exist_ok=True)
    with file.open("w", newline="", encoding="utf-8") as out:
        writer = csv.writer(out)
        writer.writerow(["text", "label"])
        for number in range(40):
            words = [*generator.sample(["the", "film", "plot", "was", "seen"], 3), ("good", "bad")[number % 2]]
            writer.writerow([" ".join(words), ("praise", "blame")[number % 2]])
    return file


def write_images(folder: Path) -> Path:
    """A folder of two classes of eight plain images of 16 x 16."""
    for label, colour in (("red", (200, 40, 40)), ("blue", (40, 40, 200))):
        (folder / label).mkdir(parents=True)
        for number in range(8):
            Image.fromarray(np.full((16, 16, 3), np.array(colour) + number, np.uint8)).save(
                folder / label / f"{number}.png"
            )
    return folder


def _generation(folder: Path) -> RunOptions:
    file = _write(folder / "verses.txt", ["the sun and the moon doth speak of the king"] * 40)
    model = {"num_layers": 1, "max_length": 16, **_LAYER}
    return _options("tiny-shakespeare", folder, model, ROWS, "tokenizer.vocabulary_size=270", own_data=_own(file))


def _conversations(folder: Path) -> RunOptions:
    tiny_tuning.write_folders(folder / "models")
    (folder / "data").mkdir()
    file = tiny_tuning.write_data(folder / "data")["chats"]
    _, settings = tiny_tuning.RECIPES["chats"]
    return _options(*("tiny-shakespeare", folder, {}, *settings), own_data=_own(file), init=folder / "models" / "llama")


def _translation(folder: Path) -> RunOptions:
    file = _write(folder / "pairs.tsv", ["one two\teins zwei", "two three\tzwei drei"] * 20)
    model = {"num_encoder_layers": 1, "num_decoder_layers": 1, "max_source_length": 16, "max_target_length": 16}
    tiny = {**model, **_LAYER}
    return _options("multi30k-en-de", folder, tiny, TOKENS, "tokenizer.vocabulary_size=280", own_data=_own(file))


def _text_classification(folder: Path, *more: str) -> RunOptions:
    tiny = {"num_layers": 1, "max_length": 32, **_LAYER}
    vocabulary = "tokenizer.vocabulary_size=280"
    return _options("ag-news", folder, tiny, TOKENS, vocabulary, *more, own_data=_own(write_texts(folder)))


def _several_labels(folder: Path) -> RunOptions:
    return _text_classification(folder, "classification.multi_label=true")


def _token_classification(folder: Path) -> RunOptions:
    file = _write(folder / "tags.conll", ["the\tO", "fire\tB-name", "is\tO", ""] * 20)
    tiny = {"num_layers": 1, "max_length": 32, **_LAYER}
    return _options("ud-ewt-pos", folder, tiny, TOKENS, "tokenizer.vocabulary_size=280", own_data=_own(file))


def _image_classification(folder: Path) -> RunOptions:
    tiny = {"num_layers": 1, "patch_size": 8, **_LAYER}
    return _options("cifar10", folder, tiny, ROWS, *_SQUARE, own_data=_own(write_images(folder / "images")))


def _image_embedding(folder: Path) -> RunOptions:
    tiny = {"num_layers": 1, "patch_size": 4, **_LAYER}
    head = ("local_size=8", "num_local_views=2", "num_prototypes=16", "d_hidden=32", "d_bottleneck=16")
    own = _own(write_images(folder / "images"))
    return _options(
        "cifar10-dino", folder, tiny, ROWS, *_SQUARE, *(f"distillation.{one}" for one in head), own_data=own
    )


def _image_text_embedding(folder: Path) -> RunOptions:
    tiny = {"d_space": 16, "max_length": 16, "text_num_layers": 1, "text_d_model": 16, "text_num_heads": 2}
    tiny |= {"text_d_ff": 32, **_TOWER}
    data = tiny_pictures.write_picture_data(folder / "data")
    return _options("clip", folder, tiny, ROWS, *_SQUARE, "tokenizer.vocabulary_size=280", data_dir=data)


def _segmentation(folder: Path) -> RunOptions:
    tiny = {**_TOWER, "stem": '"strided_convolutions"', "mask_stride": 2, "d_detail": 8, "num_layers": 1}
    tiny |= {"d_model": 32, "num_heads": 2, "d_ff": 32}
    square = ("preprocessing.height=32", "preprocessing.width=32", "data.valid_fraction=0.25")
    return _options("segment", folder, tiny, ROWS, *square, data_dir=write_segment_data(folder / "data"))


def _captioning(folder: Path) -> RunOptions:
    tiny = {**_TOWER, "max_target_length": 24, "num_layers": 1, "d_model": 32, "num_heads": 2, "d_ff": 64}
    data = tiny_pictures.write_caption_data(folder / "data")
    return _options("caption", folder, tiny, ROWS, *_SQUARE, "tokenizer.vocabulary_size=340", data_dir=data)


def _transcription(folder: Path) -> RunOptions:
    settings = [one for one in tiny_transcriber.SETTINGS if one.startswith(("model.", "audio.", "tokenizer."))]
    file = tiny_transcriber.write_tones(folder / "data", "train")
    return _options("telephone-transcriber", folder, {}, ROWS, *settings, own_data=_own(file))


def _autoencoding(folder: Path) -> RunOptions:
    own = _own(write_images(folder / "images"))
    return _options("fashion-mnist-autoencoder", folder, _AUTOENCODER, ROWS, *_SQUARE, own_data=own)


def _image_generation(folder: Path) -> RunOptions:
    first = run_training(_autoencoding(folder / "first"), Console(quiet=True))
    own = _own(write_images(folder / "images"))
    tiny = {**_AUTOENCODER, **_DENOISER}
    return _options("fashion-mnist-diffusion", folder, tiny, ROWS, *_SQUARE, own_data=own, init=first)


def _image_generation_of_texts(folder: Path) -> RunOptions:
    data, share = tiny_pictures.write_picture_data(folder / "data"), "data.valid_fraction=0.2"
    first = _options("emoji-autoencoder", folder / "first", _AUTOENCODER, ROWS, *_SQUARE, share, data_dir=data)
    start = run_training(first, Console(quiet=True))
    tiny = {**_AUTOENCODER, **_DENOISER, "text_num_layers": 1}
    more = (ROWS, *_SQUARE, share, "tokenizer.vocabulary_size=280")
    return _options("emoji-diffusion", folder, tiny, *more, data_dir=data, init=start)


def _audio_coding(folder: Path) -> RunOptions:
    own = _own(tiny_voice.write_recordings(folder / "data"))
    return _options("telephone-codec", folder, tiny_voice.CODEC, ROWS, own_data=own)


def _speech_synthesis(folder: Path) -> RunOptions:
    first = run_training(_audio_coding(folder / "first"), Console(quiet=True))
    own = _own(tiny_voice.write_recordings(folder / "data", repeats=2))
    weight = "speech.first_book_weight=1.5"
    return _options("telephone-speech", folder, _SPEAKER, ROWS, weight, own_data=own, init=first)


TINY_TASKS: dict[str, Callable[[Path], RunOptions]] = {
    "generation": _generation,
    "generation of conversations": _conversations,
    "translation": _translation,
    "text_classification": _text_classification,
    "text_classification by several labels": _several_labels,
    "token_classification": _token_classification,
    "image_classification": _image_classification,
    "image_embedding": _image_embedding,
    "image_text_embedding": _image_text_embedding,
    "segmentation": _segmentation,
    "captioning": _captioning,
    "transcription": _transcription,
    "autoencoding": _autoencoding,
    "image_generation": _image_generation,
    "image_generation of texts": _image_generation_of_texts,
    "audio_coding": _audio_coding,
    "speech_synthesis": _speech_synthesis,
}
"""Makes the options of a run in an empty folder, by the task and what is special about it."""
