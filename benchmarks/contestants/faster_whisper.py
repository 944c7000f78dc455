"""faster-whisper in int8, in its own process: python -m benchmarks.contestants.faster_whisper THREADS MODEL.

MODEL is a folder of `transformers`, which is converted beside its weights. A request names the files of the callers'
clips, how many times each caller sends its clip, and the tokens of a transcript. Callers are threads that call
`transcribe` with the bytes of a file, without timestamps, voice activity detection and fallback. A number of callers
is measured in the way that was the quickest when all were tried with it; `setting` names it. With `joined`, the clips
of all callers are put into one audio instead, whose parts `BatchedInferencePipeline` runs in batches.
"""

import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from ctranslate2.converters import TransformersConverter
from faster_whisper import BatchedInferencePipeline, WhisperModel
from faster_whisper.audio import decode_audio

from benchmarks.worker import serve

_START_TOKENS = 4
"""Of a transcript without times: start, language, task, no timestamps."""
_OPTIONS: dict[str, Any] = {
    "language": "en",
    "beam_size": 1,
    "temperature": 0.0,
    "without_timestamps": True,
    "suppress_tokens": [],  # besides the special tokens, which it always suppresses, and so does the bundle
    "compression_ratio_threshold": None,
    "log_prob_threshold": None,
    "no_speech_threshold": None,
}
_JOINED_BATCH = 8
Transcribe = Callable[[Path, int], tuple[list[int], str]]
"""Takes a file and a number of tokens; returns the tokens that were written, and their text."""


@cache
def _model(folder: Path, threads: int, workers: int) -> WhisperModel:
    return WhisperModel(str(folder), device="cpu", compute_type="int8", cpu_threads=threads, num_workers=workers)


def _limit(num_tokens: int) -> int:
    """Returns the `max_new_tokens` that makes so many: CTranslate2 halves the length with the start, and takes one."""
    return 2 * (num_tokens + 1) - _START_TOKENS


def _alone(model: WhisperModel, file: Path, num_tokens: int) -> tuple[list[int], str]:
    options = _OPTIONS | {"condition_on_previous_text": False, "vad_filter": False}
    segments, _ = model.transcribe(BytesIO(file.read_bytes()), max_new_tokens=_limit(num_tokens), **options)
    (segment,) = segments
    return segment.tokens, segment.text


def _batched(pipeline: BatchedInferencePipeline, file: Path, num_tokens: int) -> tuple[list[int], str]:
    audio = decode_audio(BytesIO(file.read_bytes()))
    whole = [{"start": 0.0, "end": len(audio) / 16_000}]
    segments, _ = pipeline.transcribe(
        audio, vad_filter=False, clip_timestamps=whole, max_new_tokens=_limit(num_tokens), **_OPTIONS
    )
    (segment,) = segments
    return segment.tokens, segment.text


class _Library:
    def __init__(self, threads: int, weights: Path) -> None:
        self._threads, self._folder = threads, weights / "converted" / "ctranslate2-int8"
        if not (self._folder / "model.bin").is_file():
            copied = ["tokenizer.json", "preprocessor_config.json"]
            TransformersConverter(str(weights), copy_files=copied).convert(
                str(self._folder), quantization="int8", force=True
            )
        self._best: dict[int, str] = {}

    def answer(self, request: dict[str, Any]) -> Mapping[str, Any]:
        files, num_calls, num_tokens = [*map(Path, request["files"])], request["calls"], request["tokens"]
        if request.get("joined"):
            return self._run_joined(files, num_calls, num_tokens)
        ways, callers = self._ways(len(files)), len(files)
        if callers not in self._best:
            for way in ways.values():  # loads the models
                way(files[:1], 1, num_tokens)
            times = {name: way(files, num_calls, num_tokens)["elapsed_s"] for name, way in ways.items()}
            self._best[callers] = min(times, key=times.__getitem__)
            return ways[self._best[callers]](files, num_calls, num_tokens) | {
                "setting": self._best[callers],
                "tried_s": times,
            }
        return ways[self._best[callers]](files, num_calls, num_tokens) | {"setting": self._best[callers]}

    def _ways(self, callers: int) -> dict[str, Callable[[list[Path], int, int], dict[str, Any]]]:
        """Returns what may be the quickest: one model on all threads or several, and how many call at a time."""
        ways: dict[str, Callable[[list[Path], int, int], dict[str, Any]]] = {}
        for workers, each in dict.fromkeys(((1, self._threads), (self._threads, 1), (2, self._threads))):
            model = _model(self._folder, each, workers)
            name = f"num_workers {workers}, cpu_threads {each}"
            for size in sorted({callers, min(callers, workers + 1)}):
                ways[f"{name}, {size} calls at a time"] = partial(self._run, partial(_alone, model), size)
            if workers == 1 or callers > 1:
                pipeline = BatchedInferencePipeline(model)
                ways[f"{name}, {callers} calls at a time of BatchedInferencePipeline"] = partial(
                    self._run, partial(_batched, pipeline), callers
                )
        return ways

    def _run(
        self, transcribe: Transcribe, at_a_time: int, files: list[Path], num_calls: int, num_tokens: int
    ) -> dict[str, Any]:
        waits: list[float] = []
        texts = [""] * len(files)

        with ThreadPoolExecutor(at_a_time) as pool:

            def keep_calling(number: int) -> None:
                for _ in range(num_calls):
                    sent = time.perf_counter()
                    tokens, texts[number] = pool.submit(transcribe, files[number], num_tokens).result()
                    waits.append(time.perf_counter() - sent)
                    if len(tokens) != num_tokens:
                        raise RuntimeError(f"a transcript has {len(tokens)} tokens, {num_tokens} were asked for")

            began = time.perf_counter()
            with ThreadPoolExecutor(len(files)) as callers:
                list(callers.map(keep_calling, range(len(files))))
            elapsed = time.perf_counter() - began
        return {"elapsed_s": elapsed, "waits_s": waits, "texts": texts}

    def _run_joined(self, files: list[Path], num_calls: int, num_tokens: int) -> dict[str, Any]:
        pipeline = BatchedInferencePipeline(_model(self._folder, self._threads, 1))
        began, waits, texts = time.perf_counter(), [], []
        for _ in range(num_calls):
            sent = time.perf_counter()
            clips = [decode_audio(BytesIO(file.read_bytes())) for file in files]
            ends = np.cumsum([len(clip) for clip in clips]) / 16_000
            parts = [{"start": end - len(clip) / 16_000, "end": end} for clip, end in zip(clips, ends, strict=True)]
            segments, _ = pipeline.transcribe(
                np.concatenate(clips),
                vad_filter=False,
                clip_timestamps=parts,
                batch_size=_JOINED_BATCH,
                max_new_tokens=_limit(num_tokens),
                **_OPTIONS,
            )
            found = [*segments]
            counts = {len(segment.tokens) for segment in found}
            if len(found) != len(files) or counts != {num_tokens}:
                raise RuntimeError(f"{len(found)} transcripts have {sorted(counts)} tokens")
            texts = [segment.text for segment in found]
            waits += [time.perf_counter() - sent] * len(files)
        return {"elapsed_s": time.perf_counter() - began, "waits_s": waits, "texts": texts}


if __name__ == "__main__":
    serve(_Library(int(sys.argv[1]), Path(sys.argv[2])).answer, ["faster-whisper", "ctranslate2"])
