"""What is spoken greedily, by a server in a process of its own, is what PyTorch speaks code by code."""

import io
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch

from headway_client import Client
from headway_training.checkpoint import load_model, load_tokenizer
from headway_training.models import SpeechSynthesizer

MAX_CODES = 94
"""What the tiny model holds after its longest prompt."""


@torch.inference_mode()
def speak(model: SpeechSynthesizer, prompt: list[int], end_id: int) -> np.ndarray:
    """Takes the likeliest code of each book in turn, reading all tokens anew for each, and decodes all of them."""
    shape = model.configuration
    first = shape.vocabulary_size
    codes: list[int] = []
    while len(codes) < MAX_CODES:
        logits = model.predict(torch.tensor([prompt + codes]))[0, -1]
        start = first + len(codes) % shape.num_books * shape.codebook_size
        allowed = torch.full_like(logits, -torch.inf)
        allowed[start : start + shape.codebook_size] = 0
        if codes and len(codes) % shape.num_books == 0:
            allowed[end_id] = 0
        chosen = int((logits + allowed).argmax())
        if chosen == end_id:
            break
        codes.append(chosen)
    frames = (torch.tensor(codes) - first).reshape(1, -1, shape.num_books) % shape.codebook_size
    return model.decode(frames)[0][0].numpy()


@pytest.mark.parametrize("voice", ["ann", "bob", ""])
def test_greedy_speech_is_pytorchs(voice_client: Client, voice_checkpoint: Path, voice: str):
    model, described = load_model(voice_checkpoint)
    tokenizer = load_tokenizer(voice_checkpoint)
    shape = model.configuration
    before: list[int] = []
    if voice:
        codes = model.voices[described.labels.index(voice)]
        offsets = shape.vocabulary_size + torch.arange(shape.num_books) * shape.codebook_size
        before = (codes + offsets).flatten().tolist()
    for text in ("low", "high", "both low"):
        exact = speak(model, before + tokenizer.encode(text).ids, described.special_tokens.eos)
        [spoken] = voice_client.synthesize_speech([text], voice=voice, temperature=0)
        samples, rate = soundfile.read(io.BytesIO(spoken.audio), dtype="int16")
        assert (rate, len(samples)) == (8000, len(exact))
        np.testing.assert_allclose(samples, np.clip(exact * 32_768, -32_768, 32_767), atol=2)
        with voice_client.stream_synthesize_speech(text, voice=voice, temperature=0) as stream:
            assert b"".join(part.pcm for part in stream) == samples.tobytes()
