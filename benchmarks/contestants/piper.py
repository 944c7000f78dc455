"""Piper, in its process: python -m benchmarks.contestants.piper THREADS.

The voice has the geometry of Piper's `medium` (VITS, one speaker, 22,050 samples a second) and random weights, which
draw random durations. A request names `texts`, one a caller; all callers ask at the same moment, each in a thread. The
answer holds of each caller what it waits for the first audio and for the last, and how long the audio is, in seconds.
"""

import sys
import tempfile
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import onnxruntime
import torch
from piper import PiperVoice
from piper.config import PiperConfig
from piper.phoneme_ids import DEFAULT_PHONEME_ID_MAP
from piper.train.vits.config import ModelAudioConfig
from piper.train.vits.models import SynthesizerTrn

from benchmarks.worker import serve

_RATE = 22_050
_NUM_SYMBOLS = 256


def _write_graph(file: Path) -> None:
    """Writes what `piper.train.export_onnx` writes of a checkpoint, of random weights."""
    torch.manual_seed(0)
    model = SynthesizerTrn(
        n_vocab=_NUM_SYMBOLS,
        spec_channels=513,
        segment_size=32,
        inter_channels=192,
        hidden_channels=192,
        filter_channels=768,
        n_heads=2,
        n_layers=6,
        kernel_size=3,
        p_dropout=0.1,
        **asdict(ModelAudioConfig.low_quality()),
    ).eval()
    with torch.no_grad():
        model.dec.remove_weight_norm()

    def infer(text: Any, lengths: Any, scales: Any) -> Any:
        audio = model.infer(text, lengths, noise_scale=scales[0], length_scale=scales[1], noise_scale_w=scales[2])
        return audio[0].unsqueeze(1)

    model.forward = infer
    torch.onnx.export(
        model,
        (torch.randint(0, _NUM_SYMBOLS, (1, 50)), torch.tensor([50]), torch.tensor([0.667, 1.0, 0.8])),
        file,
        opset_version=15,
        input_names=["input", "input_lengths", "scales"],
        output_names=["output"],
        dynamic_axes={"input": {0: "batch", 1: "phonemes"}, "input_lengths": {0: "batch"}, "output": {0: "b", 2: "t"}},
        dynamo=False,
    )


def _load(threads: int) -> PiperVoice:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "voice.onnx"
        _write_graph(file)
        session = onnxruntime.InferenceSession(file, sess_options=options, providers=["CPUExecutionProvider"])
    described = {
        "audio": {"sample_rate": _RATE},
        "espeak": {"voice": "en-us"},
        "num_symbols": _NUM_SYMBOLS,
        "num_speakers": 1,
        "phoneme_id_map": DEFAULT_PHONEME_ID_MAP,
    }
    return PiperVoice(session=session, config=PiperConfig.from_dict(described))


def main() -> None:
    """Answers requests."""
    voice = _load(int(sys.argv[1]))

    def speak(text: str, began: float) -> dict[str, float]:
        times, samples = [], 0
        for chunk in voice.synthesize(text):
            samples += len(chunk.audio_int16_array)
            times.append(time.perf_counter() - began)
        return {"first_s": times[0], "last_s": times[-1], "audio_s": samples / _RATE}

    def answer(request: dict[str, Any]) -> Mapping[str, Any]:
        texts, began = request["texts"], time.perf_counter()
        with ThreadPoolExecutor(len(texts)) as pool:
            return {"calls": list(pool.map(lambda text: speak(text, began), texts))}

    serve(answer, ("piper-tts", "onnxruntime"))


if __name__ == "__main__":
    main()
