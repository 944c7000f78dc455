"""Models that read a sound whole, and how they prepare it: those that transcribe it by CTC, and classifiers.

N samples, F frames, M mel bins, V tokens.
"""

from __future__ import annotations

import random
from bisect import bisect_left
from typing import Any, Final, cast

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models
from torch import Tensor, nn
from transformers import (
    ASTFeatureExtractor,
    AutoModelForAudioClassification,
    AutoModelForCTC,
    LasrFeatureExtractor,
    LasrTokenizer,
    ParakeetFeatureExtractor,
    ParakeetTokenizer,
    SeamlessM4TFeatureExtractor,
    Wav2Vec2CTCTokenizer,
    Wav2Vec2FeatureExtractor,
)

from headway_export.errors import SourceError
from headway_export.huggingface.folder import ModelFolder, as_source_error, read_extractor, without_parametrizations
from headway_export.source import ExportSource
from headway_server.bundles import ClassificationScheme, Ctc, FilterBank, Normalization, SoundPreprocessing
from headway_server.preprocessing import TextTokenizer
from headway_server.preprocessing.sound import SoundReader
from headway_server.tasks.speech.ctc import CtcReader
from headway_training import folders

WINDOW_S: Final = 30.0
"""Longest sound that is read at once: attention takes memory by its square."""
STRIDE_S: Final = 5.0
"""Part of a window at either end whose text is that of its neighbour, a sixth as in the pipelines of `transformers`."""
_MOST_SHORTEST: Final = 1 << 15
"""Samples within which the shortest sound of a model is looked for."""
_FIRST: Final = 32_000
"""Samples of a sound."""
_FURTHER: Final = 51_200
"""Samples that another has more; the difference in frames tells the samples of a frame."""
_FEATURE_BOUND: Final = 5e-3
"""Largest difference of a feature from that of `transformers`, which computes some in float32; most are 1 to 10."""
_NUM_TEXTS: Final = 200
"""Drawn rows of tokens whose texts are compared."""
SOUND_CLASSIFIERS: Final = (
    "ForAudioClassification",
    *(
        f"{prefix}ForSequenceClassification"
        for prefix in (
            *("Wav2Vec2", "Hubert", "WavLM", "Data2VecAudio", "Wav2Vec2Conformer", "SEW", "SEWD", "UniSpeech"),
            *("UniSpeechSat", "Wav2Vec2Bert"),
        )
    ),
)
"""Architectures that classify sounds; others of the second name classify texts."""
_KALDI: Final = {"fft_size": 512, "frame_length": 400, "hop_length": 160, "mel_scale": "kaldi"}
_KALDI_LOUD: Final = {"preemphasis": 0.97, "removes_offset": True, "floor": 1.192092955078125e-07}


class HuggingFaceSounds(nn.Module):
    """A model of sounds of `transformers`, in its own arithmetic."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self._input = str(model.main_input_name)

    def forward(self, values: Tensor) -> Tensor:
        """Samples (B, N) or features (B, F, M) -> logits: (B, frames, V) of a transcript, (B, V) of labels."""
        return cast("Tensor", self.model(**{self._input: values}, return_dict=True).logits)


def read_ctc(folder: ModelFolder) -> tuple[ExportSource, tuple[str, ...]]:
    """Reads a model that transcribes by connectionist temporal classification.

    Raises:
        SourceError: The folder is incomplete, or its model, its preprocessing or its tokenizer cannot be served.
    """
    with as_source_error():
        own = folders.open_tokenizer(folder.path)
    tokenizer, delimiter = _plain_tokenizer(folder, own)
    model = _load(folder, AutoModelForCTC)
    sound = read_sound(folder, model)
    unit = _samples_per_frame(folder, model, sound)
    rate = sound.sampling_rate
    window, stride = (round(seconds * rate / unit) * unit for seconds in (WINDOW_S, STRIDE_S))
    ctc = Ctc(
        blank=int(own.pad_token_id),
        word_delimiter=delimiter,
        samples_per_frame=unit,
        stride_samples=stride,
    )
    _check_texts(folder, own, tokenizer, ctc, int(folder.config.vocab_size))
    source = folder.source(
        model,
        without_parametrizations(HuggingFaceSounds(model)),
        make_reference=lambda: HuggingFaceSounds(_load(folder, AutoModelForCTC)).eval(),
        tokenizer=tokenizer,
        sound=sound.model_copy(update={"window_samples": window}),
        ctc=ctc,
    )
    has_language_model = any((folder.path / name).exists() for name in ("language_model", "alphabet.json"))
    notes = ("the folder's language model is not read: the likeliest token of each frame is taken",)
    return source, notes if has_language_model else ()


def read_sound_classifier(folder: ModelFolder) -> tuple[ExportSource, tuple[str, ...]]:
    """Reads a model that classifies sounds.

    Raises:
        SourceError: The folder is incomplete, or its model or its preprocessing cannot be served.
    """
    config = folder.config
    if config.problem_type == "regression":
        raise SourceError(f"{folder.path}: gives numbers in place of labels (problem_type regression); not supported")
    model = _load(folder, AutoModelForAudioClassification)
    labels = folders.labels_of(config)
    several = config.problem_type == "multi_label_classification"
    scheme = ClassificationScheme(kind="multi_label", thresholds=(0.5,) * len(labels)) if several else None
    source = folder.source(
        model,
        without_parametrizations(HuggingFaceSounds(model)),
        make_reference=lambda: HuggingFaceSounds(_load(folder, AutoModelForAudioClassification)).eval(),
        labels=labels,
        classification=scheme,
        sound=read_sound(folder, model),
    )
    return source, ()


def _load(folder: ModelFolder, auto_class: Any) -> nn.Module:
    """Loads the model; what masks a sound in training may be missing, as it is from published weights."""
    kind = auto_class._model_mapping.get(type(folder.config), None)  # noqa: SLF001 (no other name before it is loaded)
    prefix = getattr(kind, "base_model_prefix", "")
    return folder.load(auto_class, unused=(f"{prefix}.masked_spec_embed",))


# Preprocessing


def read_sound(folder: ModelFolder, model: nn.Module) -> SoundPreprocessing:
    """Reads how sounds are prepared, and compares that with `transformers`.

    Raises:
        SourceError: It is not said, or in a way that cannot be served.
    """
    extractor = read_extractor(folder)
    window = round(WINDOW_S * extractor.sampling_rate)
    if (found := _map(extractor)) is None:
        raise SourceError(f"{folder.path}: hears by {type(extractor).__name__}, which is not supported")
    sizes = {"sampling_rate": extractor.sampling_rate, "min_samples": 1, "window_samples": window}
    sound = SoundPreprocessing(**{**sizes, **found})
    sound = sound.model_copy(update={"min_samples": _shortest(folder, model, sound)})
    _check_sounds(folder, extractor, sound)
    return sound


def _map(extractor: Any) -> dict[str, Any] | None:
    """Says in the manifest's words what a feature extractor does; None: it is none that is known."""
    rate = int(extractor.sampling_rate)
    match extractor:
        case Wav2Vec2FeatureExtractor():
            return {"normalization": Normalization(of="all", epsilon=1e-7)} if extractor.do_normalize else {}
        case SeamlessM4TFeatureExtractor():
            bank = FilterBank(
                num_mel_bins=extractor.num_mel_bins,
                window="povey",
                min_frequency=20.0,
                max_frequency=rate // 2,
                scale=2.0**15,
                **_KALDI,
                **_KALDI_LOUD,
            )
            normalization = Normalization(of="bins", epsilon=1e-7)
            return {"filter_bank": bank, "normalization": normalization, "stacked_frames": extractor.stride}
        case ASTFeatureExtractor():
            bank = FilterBank(
                num_mel_bins=extractor.num_mel_bins,
                window="hann",
                min_frequency=20.0,
                max_frequency=rate // 2,
                **_KALDI,
                **_KALDI_LOUD,
            )
            constants = Normalization(of="constants", mean=extractor.mean, std=2 * extractor.std)
            return {
                "filter_bank": bank,
                "normalization": constants if extractor.do_normalize else None,
                "num_frames": extractor.max_length,
                "window_samples": (extractor.max_length - 1) * bank.hop_length + bank.frame_length,
            }
        case ParakeetFeatureExtractor():
            bank = FilterBank(
                num_mel_bins=extractor.feature_size,
                fft_size=extractor.n_fft,
                frame_length=extractor.win_length,
                hop_length=extractor.hop_length,
                window="hann",
                mel_scale="slaney",
                max_frequency=rate / 2,
                is_centered=True,
                preemphasis=extractor.preemphasis or 0.0,
                preemphasizes="audio",
                floor=2.0**-24,
                adds_floor=True,
            )
            return {"filter_bank": bank, "normalization": Normalization(of="bins", epsilon=1e-5, in_deviation=True)}
        case LasrFeatureExtractor():
            sizes = {
                "fft_size": extractor.n_fft,
                "frame_length": extractor.win_length,
                "hop_length": extractor.hop_length,
            }
            bank = FilterBank(
                num_mel_bins=extractor.feature_size,
                window="hann",
                min_frequency=125.0,
                max_frequency=7500.0,
                floor=1e-5,
                **{**_KALDI, **sizes},
            )
            return {"filter_bank": bank}
    return None


def _shortest(folder: ModelFolder, model: nn.Module, sound: SoundPreprocessing) -> int:
    """Returns the samples of the shortest sound that a model reads.

    Raises:
        SourceError: It reads none of two seconds.
    """
    noise = np.random.default_rng(0).normal(size=_MOST_SHORTEST).astype(np.float32)
    reader = SoundReader(sound, None, max_bytes=0)

    def is_read(num_samples: int) -> bool:
        values = reader.input_of(noise[:num_samples])[sound.input_name]
        if not values.size or not np.isfinite(values).all():
            return False
        try:
            logits = _logits(model, values)
        except (RuntimeError, ValueError, IndexError, ZeroDivisionError):  # of convolutions longer than the sound
            return False
        return bool(logits.size) and bool(np.isfinite(logits).all())

    if not is_read(_MOST_SHORTEST):
        raise SourceError(f"{folder.path}: {type(model).__name__} does not read sounds of {_MOST_SHORTEST} samples")
    bank = sound.filter_bank
    least = bank.frame_length if bank is not None and not bank.is_centered else 1
    return bisect_left(range(_MOST_SHORTEST), True, lo=least, key=is_read)


def _logits(model: nn.Module, values: NDArray[np.float32]) -> NDArray[np.float32]:
    """Returns the logits of one input."""
    with torch.inference_mode():
        logits: Tensor = HuggingFaceSounds(model)(torch.from_numpy(values)[np.newaxis])[0]
    return logits.numpy()


def _samples_per_frame(folder: ModelFolder, model: nn.Module, sound: SoundPreprocessing) -> int:
    """Returns the samples from a frame of the output to the next.

    Raises:
        SourceError: Frames are no fixed number of samples apart.
    """
    reader, noise = (
        SoundReader(sound, None, max_bytes=0),
        np.random.default_rng(0).normal(size=_FIRST + _FURTHER).astype(np.float32),
    )
    short, long = (
        len(_logits(model, reader.input_of(noise[:size])[sound.input_name])) for size in (_FIRST, _FIRST + _FURTHER)
    )
    if long <= short or _FURTHER % (long - short):
        raise SourceError(
            f"{folder.path}: {type(model).__name__} gives {short} frames of {_FIRST} samples and {long} of "
            f"{_FIRST + _FURTHER}; frames that are not alike far apart have no times"
        )
    return _FURTHER // (long - short)


def _check_sounds(folder: ModelFolder, extractor: Any, sound: SoundPreprocessing) -> None:
    """Compares the inputs of fading noise, a tone and a quiet sound with those of `transformers`.

    Raises:
        SourceError: They differ.
    """
    generator, rate = np.random.default_rng(0), sound.sampling_rate
    fading = generator.normal(size=2 * rate + 77) * np.exp(-np.arange(2 * rate + 77) / rate)
    tone = np.sin(np.arange(rate) * 0.2) + 0.01 * generator.normal(size=rate)
    reader = SoundReader(sound, None, max_bytes=0)
    for sounds in (fading, tone, 1e-2 * generator.normal(size=rate)):
        samples: NDArray[np.float32] = (0.3 * sounds).astype(np.float32)
        own = extractor(samples, sampling_rate=rate, return_tensors="np")
        expected = np.asarray(own[extractor.model_input_names[0]])[0]
        found = reader.input_of(samples)[sound.input_name]  # without a last frame that would be masked
        if len(expected) - len(found) not in (0, 1) or expected.shape[1:] != found.shape[1:]:
            raise SourceError(
                f"{folder.path}: its preprocessing gives {expected.shape} of {len(samples)} samples, and a bundle's "
                f"{found.shape}; it is not supported"
            )
        if not (difference := float(np.abs(expected[: len(found)] - found).max())) <= _FEATURE_BOUND:
            raise SourceError(
                f"{folder.path}: its inputs differ by {difference:.1e} from those of transformers "
                f"(bound {_FEATURE_BOUND:.0e}); its preprocessing is not supported"
            )


# Tokens


def _plain_tokenizer(folder: ModelFolder, own: Any) -> tuple[Tokenizer, int | None]:
    """Returns what writes the texts of tokens, and the token between words, if there is one.

    Raises:
        SourceError: The tokenizer is of another kind, or has no blank.
    """
    if own.pad_token_id is None:
        raise SourceError(f"{folder.path}: its tokenizer names no pad_token, which is the blank of CTC")
    if isinstance(own, (ParakeetTokenizer, LasrTokenizer)):
        return Tokenizer.from_str(own.backend_tokenizer.to_str()), None
    if not isinstance(own, Wav2Vec2CTCTokenizer):
        raise SourceError(f"{folder.path}: writes by {type(own).__name__}, which is not supported for {folder.task}")
    vocabulary = own.get_vocab()
    if own.do_lower_case:
        vocabulary = {token.lower(): index for token, index in vocabulary.items()}
        if len(vocabulary) != len(own.get_vocab()):
            raise SourceError(f"{folder.path}: do_lower_case makes tokens alike that its tokenizer tells apart")
    delimiter = own.word_delimiter_token.lower() if own.do_lower_case else own.word_delimiter_token
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=own.unk_token))
    steps = [decoders.Replace(delimiter, own.replace_word_delimiter_char), decoders.Fuse()]
    if own.clean_up_tokenization_spaces:
        steps += [decoders.Replace(f" {mark}", mark) for mark in (".", "?", "!", ",")]
        steps += [decoders.Replace(" ' ", "'")]
        steps += [decoders.Replace(f" {end}", end) for end in ("n't", "'m", "'s", "'ve", "'re")]
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer, vocabulary.get(delimiter)


def _check_texts(folder: ModelFolder, own: Any, tokenizer: Tokenizer, ctc: Ctc, vocab_size: int) -> None:
    """Compares the texts of drawn frames with those of `transformers`.

    Raises:
        SourceError: They differ, or tokens are missing from either side.
    """
    if (largest := max(tokenizer.get_vocab().values())) >= vocab_size:
        raise SourceError(
            f"{folder.path}: the tokenizer has a token of id {largest}, and the model's vocabulary ends at "
            f"{vocab_size - 1}; they do not belong together"
        )
    reader, draw = CtcReader(TextTokenizer(tokenizer), ctc, 1.0), random.Random(0)  # noqa: S311 (no secrets)
    known = sorted(tokenizer.get_vocab().values())
    frequent = [ctc.blank, *([] if ctc.word_delimiter is None else [ctc.word_delimiter])]
    for _ in range(_NUM_TEXTS):
        tokens = draw.choices([*known, *frequent * (len(known) // 4 + 1)], k=20)
        ids = [token for token in tokens for _ in range(draw.randint(1, 2))]
        expected, found = own.decode(ids).strip(), reader.text(reader.tokens(ids))
        if expected != found:
            raise SourceError(
                f"{folder.path}: its tokenizer writes {expected!r} of tokens that a bundle's writes {found!r} of; it "
                "is not supported"
            )
