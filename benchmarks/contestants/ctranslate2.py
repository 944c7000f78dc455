"""CTranslate2 in int8: python -m benchmarks.contestants.ctranslate2 THREADS."""

import json
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import ctranslate2
from tokenizers import Tokenizer

from benchmarks.contestants.in_process import Batch, Case, Fastest, Run, decoding_run
from benchmarks.worker import serve

_SPLIT_SIZES = (4, 8, 16)
"""Sizes that a batch of prompts may be cut to: sorted by length, parts of a mixed batch have less padding."""


def vocabulary_of(converted: Path) -> list[str]:
    """Returns the tokens of a converted model by their ids; of a translation model, those of both sides."""
    (file,) = converted.glob("*vocabulary.json")
    tokens: list[str] = json.loads(file.read_text(encoding="utf-8"))
    return tokens


def converted_model(case: Case) -> Path:
    """Returns the folder of a case's model in int8, which is made if it is missing."""
    weights = Path(case["weights"])
    converted = weights / "converted" / "ctranslate2-int8"
    if not (converted / "model.bin").is_file():
        if (weights / "config.json").is_file():
            from ctranslate2.converters import TransformersConverter  # noqa: PLC0415 (PyTorch takes seconds)

            TransformersConverter(str(weights)).convert(str(converted), quantization="int8", force=True)
            return converted
        converted.mkdir(parents=True, exist_ok=True)
        vocabulary = Tokenizer.from_file(str(weights / "tokenizer.json")).get_vocab()
        _convert(case, sorted(vocabulary, key=vocabulary.__getitem__)).save(str(converted))
    return converted


def _convert(case: Case, tokens: list[str]) -> Any:
    from ctranslate2.converters.transformers import BartLoader, GPT2Loader  # noqa: PLC0415

    from benchmarks.contestants.transformers import BOS_ID, EOS_ID, PAD_ID, make_model  # noqa: PLC0415

    model = make_model(case)
    if case["task"] == "translation":
        model.config.normalize_before = model.config.normalize_embedding = False
        spec = BartLoader().get_model_spec(model)
        spec.register_source_vocabulary(tokens)
        spec.register_target_vocabulary(tokens)
        spec.config.bos_token = spec.config.decoder_start_token = tokens[BOS_ID]
        spec.config.eos_token, spec.config.unk_token = tokens[EOS_ID], tokens[PAD_ID]
    else:
        spec = GPT2Loader().get_model_spec(model)
        spec.register_vocabulary(tokens)
        spec.config.bos_token = spec.config.eos_token = spec.config.unk_token = tokens[-1]
    spec.validate()
    spec.optimize(quantization="int8")
    return spec


class _Library:
    """The library with a model on all threads, and the same model in a thread each."""

    def __init__(self, threads: int, case: Case) -> None:
        self.threads = threads
        converted = converted_model(case)
        self._tokens = vocabulary_of(converted)
        kind = ctranslate2.Translator if case["task"] == "translation" else ctranslate2.Generator
        opened = partial(kind, str(converted), "cpu")
        self.whole = opened(compute_type="int8", inter_threads=1, intra_threads=threads)
        self.parts = opened(compute_type="int8", inter_threads=threads, intra_threads=1)

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
    found = {f"one batch, {threads} threads": (library.whole, 0), "one batch, a thread": (library.parts, 0)}
    if callers > 1 and threads > 1:
        size = -(-callers // threads)
        found[f"{threads} batches of {size} at a time, a thread each"] = (library.parts, size)
    is_mixed = case["task"] == "generation" and len(set(map(len, case["token_ids"]))) > 1
    for size in (size for size in _SPLIT_SIZES if size < callers and is_mixed):
        found[f"batches of {size}, {threads} threads"] = (library.whole, size)
    return {
        name: decoding_run(case, callers, partial(library.run, model, case["beam_size"], size))
        for name, (model, size) in found.items()
    }


if __name__ == "__main__":
    serve(Fastest(partial(_Library, int(sys.argv[1])), _ways).answer, ["ctranslate2"])
