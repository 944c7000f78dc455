"""A tiny Whisper with random weights as a folder of `transformers`, and sounds that it hears."""

import io
import json
import string
import wave
from pathlib import Path

import numpy as np
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

RATE = 16_000
SECONDS = 2
"""Of a window."""
NUM_MELS = 16
LENGTH = 40
LANGUAGES = ("en", "de", "fr")
TIMES = SECONDS * 50 + 1
TIME_SCALE = 0.5
_LETTERS = [*string.ascii_lowercase, "Ġ", *(f"Ġ{letter}" for letter in string.ascii_lowercase)]
_SPECIAL = [
    "<|endoftext|>",
    "<|startoftranscript|>",
    *(f"<|{code}|>" for code in LANGUAGES),
    "<|translate|>",
    "<|transcribe|>",
    "<|startofprev|>",
    "<|nospeech|>",
    "<|notimestamps|>",
]
IDS = {token: number for number, token in enumerate([*_LETTERS, *_SPECIAL])}
FIRST_TIME = len(IDS)
SIZES = {
    "vocab_size": FIRST_TIME + TIMES,
    "num_mel_bins": NUM_MELS,
    "encoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_layers": 1,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "d_model": 32,
    "max_source_positions": SECONDS * 50,
    "max_target_positions": LENGTH,
    "pad_token_id": IDS["<|endoftext|>"],
    "bos_token_id": IDS["<|endoftext|>"],
    "eos_token_id": IDS["<|endoftext|>"],
    "decoder_start_token_id": IDS["<|startoftranscript|>"],
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
}


def write_whisper(folder: Path, *, multilingual: bool = True, seed: int = 3, **changes) -> Path:
    """Writes the folder; its weights are drawn wide enough that what it writes is varied."""
    torch.manual_seed(seed)
    model = transformers.WhisperForConditionalGeneration(transformers.WhisperConfig(**{**SIZES, **changes})).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.3)
        model.model.decoder.embed_tokens.weight[FIRST_TIME:] *= TIME_SCALE  # so that most tokens are of text
    model.save_pretrained(folder)
    transformers.WhisperFeatureExtractor(feature_size=NUM_MELS, chunk_length=SECONDS).save_pretrained(folder)
    tokenizer = Tokenizer(models.BPE(dict(zip(_LETTERS, range(len(_LETTERS)), strict=True)), _merges()))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(_SPECIAL)
    tokenizer.add_tokens([f"<|{number * 0.02:.2f}|>" for number in range(TIMES)])
    names = {"eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>", "bos_token": "<|endoftext|>"}
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained(folder)
    settings = {
        "decoder_start_token_id": IDS["<|startoftranscript|>"],
        "eos_token_id": IDS["<|endoftext|>"],
        "pad_token_id": IDS["<|endoftext|>"],
        "bos_token_id": IDS["<|endoftext|>"],
        "max_length": LENGTH,
        "is_multilingual": multilingual,
        "no_timestamps_token_id": IDS["<|notimestamps|>"],
        "prev_sot_token_id": IDS["<|startofprev|>"],
        "max_initial_timestamp_index": 20,
        "begin_suppress_tokens": [IDS["Ġ"], IDS["<|endoftext|>"]],
        "suppress_tokens": [IDS["q"], IDS["Ġq"], *range(IDS["<|startoftranscript|>"], IDS["<|notimestamps|>"])],
    }
    if multilingual:
        settings["lang_to_id"] = {f"<|{code}|>": IDS[f"<|{code}|>"] for code in LANGUAGES}
        settings["task_to_id"] = {name: IDS[f"<|{name}|>"] for name in ("transcribe", "translate")}
    (folder / "generation_config.json").write_text(json.dumps(settings))
    return folder


def _merges() -> list[tuple[str, str]]:
    return [("Ġ", letter) for letter in string.ascii_lowercase]


def sound(seconds: float, seed: int = 0) -> np.ndarray:
    """Samples (N,) float32 of tones and noise that come and go."""
    random = np.random.default_rng(seed)
    times = np.arange(int(seconds * RATE)) / RATE
    swell = 0.5 + 0.5 * np.sin(2 * np.pi * random.uniform(0.5, 3) * times)
    tone = np.sin(2 * np.pi * random.uniform(100, 3000) * times * (1 + 0.2 * times))
    return (0.3 * swell * tone + 0.1 * random.normal(size=len(times))).astype(np.float32)


def wav(samples: np.ndarray, rate: int = RATE) -> bytes:
    """Samples (N,) or (N, channels) as a WAV file of 16 bits."""
    file = io.BytesIO()
    with wave.open(file, "wb") as opened:
        opened.setnchannels(1 if samples.ndim == 1 else samples.shape[1])
        opened.setsampwidth(2)
        opened.setframerate(rate)
        opened.writeframes((np.clip(samples, -1, 1) * 32767).astype("<i2").tobytes())
    return file.getvalue()


def heard(data: bytes) -> np.ndarray:
    """Samples (N,) float32 of a WAV file of ours."""
    with wave.open(io.BytesIO(data)) as opened:
        return np.frombuffer(opened.readframes(opened.getnframes()), "<i2").astype(np.float32) / 32768
