"""Models of speech: Whisper, whose encoder hears a log-mel spectrogram and whose decoder is told by tokens what to do.

N samples, M mel bins, F frames, S positions of a window (F / 2), D model width.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import AutoModelForSpeechSeq2Seq, WhisperFeatureExtractor
from transformers.models.whisper.tokenization_whisper import TO_LANGUAGE_CODE

from headway_export.errors import SourceError
from headway_export.huggingface.encoder_decoders import (
    HuggingFaceEncoderDecoder,
    OwnEncoderDecoder,
    adapt_to,
    random_tokens,
    read_generation_config,
)
from headway_export.huggingface.folder import ModelFolder, read_extractor
from headway_export.source import ExportSource
from headway_server.bundles import AudioPreprocessing, Languages, SpeechTokens
from headway_server.preprocessing.audio import LogMel

SPEECH_HEADS: Final = ("WhisperForConditionalGeneration",)
"""Architectures that write what is said."""
_FRAMES_A_POSITION: Final = 2
"""The second convolution of the encoder has a stride of 2."""
_FEATURE_BOUND: Final = 1e-4
"""Largest difference of a feature from that of `transformers`; features are about -1 to 1.5."""


class HuggingFaceSpeech(HuggingFaceEncoderDecoder):
    """A model of speech of `transformers` as a `SpeechToText`."""

    def encode(self, input_features: Tensor) -> Tensor:  # type: ignore[override]  # the protocol is another
        """(B, M, F) -> (B, S, D)."""
        everything = torch.ones(input_features.shape[0], self.max_source_length, dtype=torch.int64)
        return self._encode(everything, input_features=input_features)


def read_transcriber(folder: ModelFolder) -> tuple[ExportSource, tuple[str, ...]]:
    """Reads a model of speech.

    Raises:
        SourceError: The folder is incomplete, or its model is none that can be served.
    """
    config = folder.config
    audio = _read_preprocessing(folder)
    tokenizer = folder.tokenizer()
    start = read_generation_config(folder, applied=("begin_suppress_tokens",))
    vocabulary = tokenizer.get_vocab()
    speech, languages = _read_tokens(folder, vocabulary)
    length, asked = int(config.max_target_positions), folder.options.max_length
    if asked is not None and asked > length:
        raise SourceError(f"{folder.path}: --max-length {asked}: the model writes {length} tokens")
    model = folder.load(AutoModelForSpeechSeq2Seq)
    adapter = partial(
        HuggingFaceSpeech, max_source_length=int(config.max_source_positions), max_target_length=asked or length
    )
    features = _Sounds(audio).features()[0]
    target = random_tokens(folder, min(48, length))
    module = adapt_to(folder, model, adapter, {"input_features": features}, target)
    source = folder.source(
        model,
        module,
        make_reference=lambda: OwnEncoderDecoder(folder.load(AutoModelForSpeechSeq2Seq), source="input_features"),
        tokenizer=tokenizer,
        special_tokens=start.special_tokens,
        suppressed_tokens=start.suppressed_tokens,
        languages=languages,
        audio_preprocessing=audio,
        speech=speech,
        evaluation=folder.evaluation(),
    )
    return source, start.notes


class _Sounds:
    """What preprocessing is compared on: noise that fades, a tone, and nearly nothing."""

    def __init__(self, audio: AudioPreprocessing) -> None:
        self._log_mel = LogMel(audio)
        random, length = np.random.default_rng(0), audio.window_samples
        fading = random.normal(size=length) * np.exp(-np.arange(length) / length * 5)
        tone = np.sin(np.arange(length // 2) * 0.2)
        self.samples = tuple(
            np.asarray(0.3 * one, np.float32) for one in (fading, tone, random.normal(size=audio.fft_size) * 1e-4)
        )

    def features(self) -> list[NDArray[np.float32]]:
        """Returns their features, (M, F) each, as a server makes them."""
        return [self._log_mel.features(one) for one in self.samples]


def _read_preprocessing(folder: ModelFolder) -> AudioPreprocessing:
    """Reads how audio becomes features, and compares them with those of `transformers`.

    Raises:
        SourceError: It is not said, or in another way than Whisper's.
    """
    extractor = read_extractor(folder)
    if not isinstance(extractor, WhisperFeatureExtractor):
        raise SourceError(f"{folder.path}: hears by {type(extractor).__name__}; WhisperFeatureExtractor is supported")
    config = folder.config
    sizes: dict[str, Any] = {
        "sampling_rate": extractor.sampling_rate,
        "num_mel_bins": extractor.feature_size,
        "fft_size": extractor.n_fft,
        "hop_length": extractor.hop_length,
        "num_frames": extractor.nb_max_frames,
    }
    expected = (config.num_mel_bins, _FRAMES_A_POSITION * config.max_source_positions)
    if (found := (sizes["num_mel_bins"], sizes["num_frames"])) != expected:
        raise SourceError(
            f"{folder.path}: preprocessor_config.json makes {found[0]} mel bins x {found[1]} frames, and the model "
            f"hears {expected[0]} x {expected[1]}; they do not belong together"
        )
    if extractor.dither or extractor.padding_value:
        raise SourceError(f"{folder.path}: dither and a padding_value other than 0 are not supported")
    audio = AudioPreprocessing(**sizes)
    sounds = _Sounds(audio)
    for samples, features in zip(sounds.samples, sounds.features(), strict=True):
        own = extractor(samples, sampling_rate=audio.sampling_rate, return_tensors="np")["input_features"][0]
        if not (difference := float(np.abs(own - features).max())) <= _FEATURE_BOUND:
            raise SourceError(
                f"{folder.path}: features differ by {difference:.1e} from those of transformers "
                f"(bound {_FEATURE_BOUND:.0e}); its preprocessing is not supported"
            )
    return audio


def _read_tokens(folder: ModelFolder, vocabulary: dict[str, int]) -> tuple[SpeechTokens, Languages | None]:
    """Reads by which tokens the model is told what to do, as `generation_config.json` says, or else by their names.

    Raises:
        SourceError: A language is asked for that the model does not have.
    """
    settings = folder.generation_config()
    tasks: dict[str, int] = getattr(settings, "task_to_id", None) or {
        name: vocabulary[f"<|{name}|>"] for name in ("transcribe", "translate") if f"<|{name}|>" in vocabulary
    }
    languages: dict[str, int] = getattr(settings, "lang_to_id", None) or {
        f"<|{code}|>": vocabulary[f"<|{code}|>"]
        for code in dict.fromkeys(TO_LANGUAGE_CODE.values())
        if f"<|{code}|>" in vocabulary
    }
    if not getattr(settings, "is_multilingual", bool(getattr(settings, "lang_to_id", None))):
        tasks, languages = {}, {}
    no_timestamps = getattr(settings, "no_timestamps_token_id", None) or vocabulary.get("<|notimestamps|>")
    first_timestamp = None
    if no_timestamps is not None and no_timestamps + 1 < folder.config.vocab_size:
        first_timestamp = no_timestamps + 1
    previous = getattr(settings, "prev_sot_token_id", None) or vocabulary.get("<|startofprev|>")
    begin = settings.begin_suppress_tokens or getattr(folder.config, "begin_suppress_tokens", None) or ()
    tokens = SpeechTokens(
        transcribe=tasks.get("transcribe"),
        translate=tasks.get("translate"),
        no_timestamps=no_timestamps,
        first_timestamp=first_timestamp,
        max_initial_timestamp=getattr(settings, "max_initial_timestamp_index", None),
        start_of_previous=previous,
        begin_suppressed=tuple(int(token) for token in begin),
    )
    codes = {name.strip("<|>"): int(token) for name, token in languages.items()}
    return tokens, Languages(target_tokens=codes) if codes else None
