"""CTranslate2 in int8: python -m benchmarks.contestants.ctranslate2 THREADS."""

import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import ctranslate2
from ctranslate2.converters.transformers import BartLoader, GPT2Loader
from tokenizers import Tokenizer

from benchmarks.contestants.in_process import Batch, Case, Fastest, Run, decoding_run
from benchmarks.contestants.transformers import BOS_ID, EOS_ID, PAD_ID, make_gpt2, make_marian
from benchmarks.worker import serve

_SPLIT_SIZES = (4, 8, 16)
"""Sizes that a batch of prompts may be cut to: sorted by length, parts of a mixed batch have less padding."""


class _Library:
    """The library with a model on all threads, and the same model in a thread each."""

    def __init__(self, threads: int, case: Case) -> None:
        weights, translates = Path(case["weights"]), case["task"] == "translation"
        self.threads = threads
        vocabulary = Tokenizer.from_file(str(weights / "tokenizer.json")).get_vocab()
        self._tokens = sorted(vocabulary, key=vocabulary.__getitem__)
        converted = weights / "converted" / "ctranslate2-int8"
        if not (converted / "model.bin").is_file():
            converted.mkdir(parents=True, exist_ok=True)
            self._convert(weights, translates=translates).save(str(converted))
        opened = partial(ctranslate2.Translator if translates else ctranslate2.Generator, str(converted), "cpu")
        self.whole = opened(compute_type="int8", inter_threads=1, intra_threads=threads)
        self.parts = opened(compute_type="int8", inter_threads=threads, intra_threads=1)

    def _convert(self, weights: Path, *, translates: bool) -> Any:
        if translates:
            marian = make_marian(weights)
            marian.config.normalize_before = marian.config.normalize_embedding = False
            spec = BartLoader().get_model_spec(marian)
            spec.register_source_vocabulary(self._tokens)
            spec.register_target_vocabulary(self._tokens)
            spec.config.bos_token = spec.config.decoder_start_token = self._tokens[BOS_ID]
            spec.config.eos_token, spec.config.unk_token = self._tokens[EOS_ID], self._tokens[PAD_ID]
        else:
            spec = GPT2Loader().get_model_spec(make_gpt2(weights))
            spec.register_vocabulary(self._tokens)
            spec.config.bos_token = spec.config.eos_token = spec.config.unk_token = self._tokens[-1]
        spec.validate()
        spec.optimize(quantization="int8")
        return spec

    def run(self, model: Any, beam_size: int, max_batch_size: int, batch: Batch, new_tokens: int) -> Batch:
        """Gives exactly so many new tokens for each text; beams are those of translations."""
        texts = [[self._tokens[token] for token in ids] for ids in batch]
        if isinstance(model, ctranslate2.Translator):
            lengths = {"max_decoding_length": new_tokens, "min_decoding_length": new_tokens}
            answers = model.translate_batch(texts, beam_size=beam_size, max_batch_size=max_batch_size, **lengths)
            return [answer.hypotheses[0] for answer in answers]
        lengths = {"max_length": new_tokens, "min_length": new_tokens}
        options = {"sampling_topk": 1, "include_prompt_in_result": False}  # so that the prompt is read at once
        answers = model.generate_batch(texts, max_batch_size=max_batch_size, **lengths, **options)
        return [answer.sequences_ids[0] for answer in answers]


def _ways(library: _Library, case: Case, callers: int) -> Mapping[str, Run]:
    threads = library.threads
    found = {f"one batch, {threads} threads": (library.whole, 0)}
    if callers > 1 and threads > 1:
        size = -(-callers // threads)
        found[f"{threads} batches of {size} at a time, a thread each"] = (library.parts, size)
    for size in (size for size in _SPLIT_SIZES if size < callers and case["task"] == "generation"):
        found[f"batches of {size}, {threads} threads"] = (library.whole, size)
    return {
        name: decoding_run(case, callers, partial(library.run, model, case["beam_size"], size))
        for name, (model, size) in found.items()
    }


if __name__ == "__main__":
    serve(Fastest(partial(_Library, int(sys.argv[1])), _ways).answer, ["ctranslate2"])
