"""CTranslate2 in int8: python -m benchmarks.contestants.ctranslate2 THREADS."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import ctranslate2
from ctranslate2.converters.transformers import BartLoader, GPT2Loader
from tokenizers import Tokenizer

from benchmarks.contestants.checkpoints import BOS_ID, EOS_ID, PAD_ID, load_gpt2, load_marian
from benchmarks.contestants.in_process import Batch, Case, Fastest, Run, decoding_batches, run_decoding
from benchmarks.worker import serve

_SPLIT_SIZES = (4, 8, 16)
"""Sizes that a batch of prompts may be cut to: sorted by length, parts of a mixed batch have less padding."""
_models: dict[str, tuple[Any, Any]] = {}


def _ways(threads: int, case: Case, callers: int) -> Mapping[str, Run]:
    weights, translates = Path(case["weights"]), case["task"] == "translate"
    converted = weights / "converted" / "ctranslate2-int8"
    if not (converted / "model.bin").is_file():
        _convert(weights, converted, translates=translates)
    if case["weights"] not in _models:
        opened = partial(ctranslate2.Translator if translates else ctranslate2.Generator, str(converted), "cpu")
        _models[case["weights"]] = (
            opened(compute_type="int8", inter_threads=1, intra_threads=threads),
            opened(compute_type="int8", inter_threads=threads, intra_threads=1),
        )
    whole, parts = _models[case["weights"]]
    tokens = json.loads(next(converted.glob("*vocabulary.json")).read_text(encoding="utf-8"))
    generate = partial(_translate, tokens, case["beam_size"]) if translates else partial(_continue, tokens)
    found = {f"one batch, {threads} threads": partial(generate, whole, 0)}
    if callers > 1 and threads > 1:
        size = -(-callers // threads)
        found[f"{threads} batches of {size} at a time, a thread each"] = partial(generate, parts, size)
    for size in (size for size in _SPLIT_SIZES if size < callers and not translates):
        found[f"batches of {size}, {threads} threads"] = partial(generate, whole, size)
    batches, limits = decoding_batches(case, callers)
    return {name: run_decoding(one, batches, limits) for name, one in found.items()}


def _continue(tokens: list[str], model: Any, max_batch_size: int, prompts: Batch, new_tokens: int) -> Batch:
    results = model.generate_batch(
        [[tokens[token] for token in prompt] for prompt in prompts],
        max_batch_size=max_batch_size,
        max_length=new_tokens,
        min_length=new_tokens,  # past an end-of-sequence token, as all sides do
        sampling_topk=1,
        include_prompt_in_result=False,  # the prompt is read at once
    )
    return [result.sequences_ids[0] for result in results]


def _translate(
    tokens: list[str], beam_size: int, model: Any, max_batch_size: int, sources: Batch, new_tokens: int
) -> Batch:
    ids = {token: index for index, token in enumerate(tokens)}
    results = model.translate_batch(
        [[tokens[token] for token in source] for source in sources],
        beam_size=beam_size,
        max_batch_size=max_batch_size,
        max_decoding_length=new_tokens,
        min_decoding_length=new_tokens,
    )
    return [[ids[token] for token in result.hypotheses[0]] for result in results]


def _convert(weights: Path, target: Path, *, translates: bool) -> None:
    vocabulary = Tokenizer.from_file(str(weights / "tokenizer.json")).get_vocab()
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    if translates:
        marian = load_marian(weights)
        marian.config.normalize_before = marian.config.normalize_embedding = False
        spec = BartLoader().get_model_spec(marian)
        spec.register_source_vocabulary(tokens)
        spec.register_target_vocabulary(tokens)
        spec.config.bos_token = spec.config.decoder_start_token = tokens[BOS_ID]
        spec.config.eos_token, spec.config.unk_token = tokens[EOS_ID], tokens[PAD_ID]
    else:
        spec = GPT2Loader().get_model_spec(load_gpt2(weights))
        spec.register_vocabulary(tokens)
        spec.config.bos_token = spec.config.eos_token = spec.config.unk_token = "<|endoftext|>"
    spec.validate()
    spec.optimize(quantization="int8")
    target.mkdir(parents=True, exist_ok=True)
    spec.save(str(target))


if __name__ == "__main__":
    serve(Fastest(partial(_ways, int(sys.argv[1]))).answer, ["ctranslate2"])
