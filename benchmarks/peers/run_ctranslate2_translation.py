"""CTranslate2 in int8, translating.

python run_ctranslate2_translation.py MODEL_FOLDER BUNDLE_FOLDER SCRATCH_FOLDER THREADS
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import ctranslate2
from worker import Batch, Contestant, Generate, serve


def main() -> None:
    """Converts the model where that was not done yet, and answers requests."""
    model, scratch, threads = Path(sys.argv[1]), Path(sys.argv[3]), int(sys.argv[4])
    converted = scratch / "ctranslate2-int8"
    if not (converted / "model.bin").is_file():
        _convert(model, converted)
    serve(["ctranslate2"], lambda: _load(converted, threads))


def _load(folder: Path, threads: int) -> Contestant:
    tokens = json.loads((folder / "shared_vocabulary.json").read_text(encoding="utf-8"))
    ids = {token: index for index, token in enumerate(tokens)}
    whole = ctranslate2.Translator(str(folder), compute_type="int8", inter_threads=1, intra_threads=threads)
    parts = ctranslate2.Translator(str(folder), compute_type="int8", inter_threads=threads, intra_threads=1)

    def translate(
        translator: ctranslate2.Translator, max_batch_size: int, beam_size: int, sources: Batch, new_tokens: int
    ) -> Batch:
        results = translator.translate_batch(
            [[tokens[token] for token in source] for source in sources],
            beam_size=beam_size,
            max_batch_size=max_batch_size,
            max_decoding_length=new_tokens,
            min_decoding_length=new_tokens,
        )
        return [[ids[token] for token in result.hypotheses[0]] for result in results]

    def ways(batch: Batch, beam_size: int) -> Mapping[str, Generate]:
        found: dict[str, Generate] = {f"one batch, {threads} threads": partial(translate, whole, 0, beam_size)}
        if len(batch) > 1 and threads > 1:
            size = -(-len(batch) // threads)
            name = f"{threads} batches of {size} at a time, a thread each"
            found[name] = partial(translate, parts, size, beam_size)
        return found

    return Contestant(ways)


def _convert(model: Path, target: Path) -> None:
    from ctranslate2.converters.transformers import BartLoader  # noqa: PLC0415 (takes seconds, and is needed once)
    from marian import BOS_ID, EOS_ID, PAD_ID, load_marian  # noqa: PLC0415
    from tokenizers import Tokenizer  # noqa: PLC0415

    vocabulary = Tokenizer.from_file(str(model / "tokenizer.json")).get_vocab()
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    marian = load_marian(model)
    marian.config.normalize_before = marian.config.normalize_embedding = False
    spec = BartLoader().get_model_spec(marian)
    spec.register_source_vocabulary(tokens)
    spec.register_target_vocabulary(tokens)
    spec.config.bos_token = spec.config.decoder_start_token = tokens[BOS_ID]
    spec.config.eos_token = tokens[EOS_ID]
    spec.config.unk_token = tokens[PAD_ID]
    spec.validate()
    spec.optimize(quantization="int8")
    target.mkdir(parents=True, exist_ok=True)
    spec.save(str(target))


if __name__ == "__main__":
    main()
