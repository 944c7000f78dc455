"""A model of speech over the NumPy decoder, which knows two languages and takes prompts as Whisper does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy_decoder import CrossTensors, NumpyEncoder
from tiny_engine import byte_tokenizer, make_bundle, make_decoder, make_parts

from headway_server.bundles import AudioPreprocessing, Languages, SpeechTokens, Task
from headway_server.decoding.interfaces import EncoderInput
from headway_server.observers import Observer
from headway_server.preprocessing import TextTokenizer
from headway_server.preprocessing.audio import AudioLimits
from headway_server.tasks.speech.model import SpeechModel

RATE = 8000
NUM_POSITIONS = 10
_SPECIAL = ("<|end|>", "<|start|>", "<|en|>", "<|de|>", "<|transcribe|>", "<|prev|>", "<|notimes|>")


class HearingEncoder(NumpyEncoder):
    """Makes positions of windows by their loudness."""

    def encode(self, inputs: Sequence[EncoderInput]) -> list[CrossTensors]:
        """See `Encoder`."""
        sounds = [each.tensors["input_features"] for each in inputs]
        self.batch_shapes.append((len(sounds), NUM_POSITIONS))
        tokens = [np.abs(sound[:, :NUM_POSITIONS] * 10).sum(axis=0).astype(int) % len(self.tokens) for sound in sounds]
        memories = [np.tanh(self.tokens[each])[np.newaxis] for each in tokens]
        return [CrossTensors(num_positions=NUM_POSITIONS, tensors={"memory": memory}) for memory in memories]


def make_speech_model(observer: Observer, *, max_length: int = 64) -> SpeechModel:
    """Makes the model; its audios have windows of 0.5 s."""
    tokenizer = byte_tokenizer(_SPECIAL)
    ids = {name: tokenizer.token_to_id(name) for name in _SPECIAL}
    vocab_size = tokenizer.get_vocab_size()
    bundle = make_bundle(
        Task.TRANSLATION,
        max_input_tokens=NUM_POSITIONS,
        max_total_tokens=max_length,
        bos=ids["<|start|>"],
        eos=ids["<|end|>"],
    )
    changes = {
        "task": Task.TRANSCRIPTION,
        "audio_preprocessing": AudioPreprocessing(
            sampling_rate=RATE, num_mel_bins=4, fft_size=200, hop_length=80, num_frames=50, max_frequency=4000
        ),
        "speech": SpeechTokens(
            transcribe=ids["<|transcribe|>"],
            no_timestamps=ids["<|notimes|>"],
            start_of_previous=ids["<|prev|>"],
        ),
        "languages": Languages(target_tokens={"en": ids["<|en|>"], "de": ids["<|de|>"]}),
    }
    parts = make_parts(
        [make_decoder(max_length=max_length, vocab_size=vocab_size, likely_id=ids["<|end|>"])],
        tokenizer=TextTokenizer(tokenizer),
        encoder=HearingEncoder(vocab_size=vocab_size),
    )
    limits = AudioLimits(max_bytes=2**24, max_seconds=600)
    manifest = bundle.manifest.model_copy(update=changes)
    return SpeechModel(replace(bundle, manifest=manifest), replace(parts, audio_limits=limits, observer=observer))
