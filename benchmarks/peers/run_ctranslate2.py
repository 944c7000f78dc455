"""CTranslate2 in int8.

python run_ctranslate2.py MODEL_FOLDER BUNDLE_FOLDER SCRATCH_FOLDER THREADS
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import ctranslate2
from worker import Batch, Contestant, Generate, serve

_SPLIT_SIZES = (4, 8, 16)
"""Sizes that a batch may be cut to: sorted by length, the pieces of a mixed batch have less padding."""


def main() -> None:
    """Converts the model where that was not done yet, and answers requests."""
    model, scratch, threads = Path(sys.argv[1]), Path(sys.argv[3]), int(sys.argv[4])
    converted = scratch / "ctranslate2-int8"
    if not (converted / "model.bin").is_file():
        _convert(model, converted)
    serve(["ctranslate2"], lambda: _load(converted, threads))


def _load(folder: Path, threads: int) -> Contestant:
    tokens = json.loads((folder / "vocabulary.json").read_text(encoding="utf-8"))
    ids = {token: index for index, token in enumerate(tokens)}
    whole = ctranslate2.Generator(str(folder), compute_type="int8", inter_threads=1, intra_threads=threads)
    parts = ctranslate2.Generator(str(folder), compute_type="int8", inter_threads=threads, intra_threads=1)

    def generate(generator: ctranslate2.Generator, max_batch_size: int, prompts: Batch, new_tokens: int) -> Batch:
        results = generator.generate_batch(
            [[tokens[token] for token in prompt] for prompt in prompts],
            max_batch_size=max_batch_size,
            max_length=new_tokens,
            min_length=new_tokens,  # past an end-of-sequence token, as all sides do
            sampling_topk=1,
            include_prompt_in_result=False,  # the prompt is read at once
        )
        return [[ids[token] for token in result.sequences[0]] for result in results]

    def ways(batch: Batch, _beam_size: int) -> Mapping[str, Generate]:
        batch_size = len(batch)
        found: dict[str, Generate] = {f"one batch, {threads} threads": partial(generate, whole, 0)}
        if batch_size > 1 and threads > 1:
            size = -(-batch_size // threads)
            found[f"{threads} batches of {size} at a time, a thread each"] = partial(generate, parts, size)
        for size in _SPLIT_SIZES:
            if size < batch_size:
                found[f"batches of {size}, {threads} threads"] = partial(generate, whole, size)
        return found

    return Contestant(ways)


def _convert(model: Path, target: Path) -> None:
    from ctranslate2.converters.transformers import GPT2Loader  # noqa: PLC0415 (takes seconds, and is needed once)
    from gpt2 import load_gpt2  # noqa: PLC0415
    from tokenizers import Tokenizer  # noqa: PLC0415

    vocabulary = Tokenizer.from_file(str(model / "tokenizer.json")).get_vocab()
    end = "<|endoftext|>"
    spec = GPT2Loader().get_model_spec(load_gpt2(model))
    spec.register_vocabulary(sorted(vocabulary, key=vocabulary.__getitem__))
    spec.config.bos_token = spec.config.eos_token = spec.config.unk_token = end
    spec.validate()
    spec.optimize(quantization="int8")
    target.mkdir(parents=True, exist_ok=True)
    spec.save(str(target))


if __name__ == "__main__":
    main()
