"""Models of speech that write it down by a decoder.

The encoder of Whisper hears a log-mel spectrogram of one length, and its decoder is told by tokens what to do.
Moonshine and SpeechT5 hear samples, and Speech2Text a filter bank's energies, of any length up to a window.

N samples, M mel bins, F frames, S positions of a window, D model width.
"""

from __future__ import annotations

import random
from functools import partial
from typing import Any, Final, cast

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from torch import Tensor, nn
from transformers import AutoModelForSpeechSeq2Seq, Speech2TextTokenizer, SpeechT5Tokenizer, WhisperFeatureExtractor
from transformers.models.whisper.tokenization_whisper import TO_LANGUAGE_CODE

from headway_export import synthetic
from headway_export.errors import SourceError
from headway_export.huggingface.encoder_decoders import (
    HuggingFaceEncoderDecoder,
    OwnEncoderDecoder,
    adapt_to,
    random_tokens,
    read_generation_config,
)
from headway_export.huggingface.folder import ModelFolder, as_source_error, read_extractor, without_parametrizations
from headway_export.huggingface.sounds import read_sound
from headway_export.huggingface.tokenizers import SPACE, convert_pieces
from headway_export.source import ExportSource
from headway_server.bundles import AudioPreprocessing, Languages, SoundPreprocessing, SpeechTokens
from headway_server.preprocessing.audio import LogMel
from headway_server.preprocessing.sound import SoundReader
from headway_training import folders

_WHISPER: Final = "WhisperForConditionalGeneration"
SPEECH_HEADS: Final = (
    _WHISPER,
    "MoonshineForConditionalGeneration",
    "Speech2TextForConditionalGeneration",
    "SpeechT5ForSpeechToText",
)
"""Architectures that write what is said."""
_WINDOW_S: Final = 30.0
"""Longest audio that is heard at once where features do not bound it: attention takes memory by its square."""
_PIECES: Final = "sentencepiece.bpe.model"
_TRIED_PART: Final = 8
"""Part of a window that a model is held against `transformers` on."""
_NUM_TEXTS: Final = 200
"""Drawn rows of tokens whose texts are compared."""
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


class HuggingFaceSoundReader(HuggingFaceEncoderDecoder):
    """A model of speech of `transformers` whose encoder hears audio of any length."""

    def __init__(self, model: nn.Module, *, max_source_length: int, max_target_length: int) -> None:
        """See `HuggingFaceEncoderDecoder`."""
        whole = cast("Any", model)
        super().__init__(
            model,
            max_source_length=max_source_length,
            max_target_length=max_target_length,
            decoder=_SpelledDecoder(whole.speecht5.decoder) if whole.config.model_type == "speecht5" else None,
        )
        for part in list(whole.get_encoder().modules()):
            for name, child in list(part.named_children()):
                if hasattr(child, "weights") and hasattr(child, "padding_idx"):
                    setattr(part, name, _CountedPositions(child))
        self._input = str(model.main_input_name)

    def encode(self, values: Tensor) -> Tensor:  # type: ignore[override]  # the protocol is another
        """Samples (B, N) or features (B, F, M) -> (B, S, D)."""
        return self._encode(None, **{self._input: values})

    def _decoder_inputs(self, position_ids: Tensor) -> dict[str, Any]:
        return {"position_ids": position_ids} if hasattr(self._decoder, "rotary_emb") else {}


class _SpelledDecoder(nn.Module):
    """The decoder of SpeechT5, whose embeddings are beside its layers, as those of other decoders are."""

    def __init__(self, decoder: nn.Module) -> None:
        super().__init__()
        prenet = cast("Any", decoder).prenet
        self.embed_tokens, self.embed_positions = prenet.embed_tokens, prenet.embed_positions
        self.layers = cast("Any", decoder).wrapped_decoder
        self._scale = prenet.embed_scale

    def forward(self, input_ids: Tensor, **given: Any) -> Any:
        """(B, T) -> what the layers give."""
        states = self.embed_tokens(input_ids) * self._scale + self.embed_positions()  # (B, T, D)
        return self.layers(hidden_states=states, **given)


class _CountedPositions(nn.Module):
    """Sinusoidal embedding of positions of an input without padding, whatever its length."""

    def __init__(self, embedding: nn.Module) -> None:
        super().__init__()
        self.table = nn.Parameter(cast("Tensor", embedding.weights).detach(), requires_grad=False)
        self._first = int(cast("Any", embedding).padding_idx) + 1

    def forward(self, padding_mask: Tensor) -> Tensor:
        """(B, S) -> (S, D)."""
        return self.table[torch.arange(padding_mask.shape[1]) + self._first]


def read_transcriber(folder: ModelFolder) -> tuple[ExportSource, tuple[str, ...]]:
    """Reads a model of speech.

    Raises:
        SourceError: The folder is incomplete, or its model is none that can be served.
    """
    return _read_whisper(folder) if folder.is_of(_WHISPER) else _read_sound_reader(folder)


def _read_sound_reader(folder: ModelFolder) -> tuple[ExportSource, tuple[str, ...]]:
    """Reads a model whose encoder hears audio of any length.

    Raises:
        SourceError: The folder is incomplete, or its model is none that can be served.
    """
    config = folder.config
    start = read_generation_config(folder)
    with as_source_error():
        own = folders.open_tokenizer(folder.path)
    tokenizer = _tokenizer(folder, own)
    names = ("max_target_positions", "max_position_embeddings", "max_text_positions")
    longest = next(int(size) for name in names if (size := getattr(config, name, None)))
    length = folder.options.max_length or longest
    if length > longest:
        raise SourceError(f"{folder.path}: --max-length {length}: the model writes {longest} tokens")
    model = _load(folder)
    sound = read_sound(folder, _Heard(model))
    sound = sound.model_copy(update={"window_samples": _window_samples(config, sound)})
    reader, window = SoundReader(sound, None, max_bytes=0), sound.window_samples
    silence = reader.input_of(np.zeros(window, np.float32))[sound.input_name]
    with torch.inference_mode():
        positions = _Heard(model)(torch.from_numpy(silence)[None]).shape[1]
    samples = synthetic.draw_speech(1, sound.sampling_rate, window // _TRIED_PART, np.random.default_rng(0))[0]
    values = reader.input_of(samples)[sound.input_name]
    adapter = partial(HuggingFaceSoundReader, max_source_length=positions, max_target_length=length)
    target = random_tokens(folder, min(48, length))
    module = adapt_to(folder, model, adapter, {sound.input_name: values}, target)
    source = folder.source(
        model,
        module,
        make_reference=lambda: OwnEncoderDecoder(_load(folder), source=str(model.main_input_name)),
        tokenizer=tokenizer,
        special_tokens=start.special_tokens,
        prompt_prefix=start.prefix,
        suppressed_tokens=start.suppressed_tokens,
        sound=sound,
        evaluation=folder.evaluation(),
    )
    return source, start.notes


def _load(folder: ModelFolder) -> nn.Module:
    """Loads the model; what masks a sound in training may be missing."""
    return without_parametrizations(
        folder.load(AutoModelForSpeechSeq2Seq, unused=("speecht5.encoder.prenet.masked_spec_embed",))
    )


class _Heard(nn.Module):
    """What the encoder of a model makes of sounds."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, values: Tensor) -> Tensor:
        """Samples (B, N) or features (B, F, M) -> (B, S, D)."""
        return cast("Tensor", cast("Any", self.model).get_encoder()(values, return_dict=True).last_hidden_state)


def _window_samples(config: Any, sound: SoundPreprocessing) -> int:
    """Returns the most samples of a window: as many frames as the encoder has positions, or some seconds."""
    if (bank := sound.filter_bank) is None:
        return round(_WINDOW_S * sound.sampling_rate)
    return (int(config.max_source_positions) - 1) * bank.hop_length + bank.frame_length


def _tokenizer(folder: ModelFolder, own: Any) -> Tokenizer:
    """Returns a folder's tokenizer, and compares the texts of drawn tokens if it was converted.

    Raises:
        SourceError: It cannot be converted, or writes texts in another way.
    """
    if getattr(own, "backend_tokenizer", None) is not None:
        return folders.plain_tokenizer(own)
    if isinstance(own, SpeechT5Tokenizer):
        return _checked_texts(folder, own, _spelling_tokenizer(own))
    if not isinstance(own, Speech2TextTokenizer):
        raise SourceError(f"{folder.path}: writes by {type(own).__name__}, which is not supported for {folder.task}")
    if own.lang_code_to_id:
        raise SourceError(
            f"{folder.path}: writes several languages ({', '.join(own.lang_code_to_id)}), which its first token "
            "chooses; not supported"
        )
    if own.do_upper_case:
        raise SourceError(f"{folder.path}: its tokenizer turns texts to capitals (do_upper_case); not supported")
    special = [str(token) for token in own.all_special_tokens]
    ids = {str(piece): int(index) for piece, index in own.get_vocab().items()}
    pieces = folder.path / _PIECES
    tokenizer = convert_pieces(pieces, ids, unknown=str(own.unk_token), end=str(own.eos_token), special=special)
    return _checked_texts(folder, own, tokenizer)


def _spelling_tokenizer(own: SpeechT5Tokenizer) -> Tokenizer:
    """Returns a tokenizer with a token for each character."""
    vocabulary, end = {str(piece): int(index) for piece, index in own.get_vocab().items()}, str(own.eos_token)
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=str(own.unk_token)))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Replace(" ", SPACE), normalizers.Prepend(SPACE)])
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.Fuse()])
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"$A {end}", special_tokens=[(end, vocabulary[end])]
    )
    tokenizer.add_special_tokens([AddedToken(str(token), normalized=False) for token in own.all_special_tokens])
    return tokenizer


def _checked_texts(folder: ModelFolder, own: Any, tokenizer: Tokenizer) -> Tokenizer:
    """Returns a tokenizer whose texts of drawn tokens are those of the folder's own.

    Raises:
        SourceError: They differ.
    """
    draw, known = random.Random(0), sorted(tokenizer.get_vocab().values())  # noqa: S311 (no secrets)
    for _ in range(_NUM_TEXTS):
        tokens = draw.choices(known, k=20)
        expected = own.decode(tokens, skip_special_tokens=True).strip()
        if (found := tokenizer.decode(tokens, skip_special_tokens=True).strip()) != expected:
            raise SourceError(
                f"{folder.path}: its tokenizer writes {expected!r} of tokens that a bundle's writes {found!r} of; it "
                "is not supported"
            )
    return tokenizer


def _read_whisper(folder: ModelFolder) -> tuple[ExportSource, tuple[str, ...]]:
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
