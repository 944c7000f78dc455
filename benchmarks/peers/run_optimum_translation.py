"""Optimum's ONNX Runtime models, translating: an encoder and a decoder with its cache, exported by Optimum itself.

python run_optimum_translation.py MODEL_FOLDER BUNDLE_FOLDER SCRATCH_FOLDER THREADS
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import onnxruntime
import torch
from marian import BOS_ID, EOS_ID, PAD_ID, load_marian
from optimum.onnxruntime import ORTModelForSeq2SeqLM
from transformers import GenerationConfig
from worker import Batch, Contestant, Generate, serve


def main() -> None:
    """Converts the model where that was not done yet, and answers requests."""
    model, scratch, threads = Path(sys.argv[1]), Path(sys.argv[3]), int(sys.argv[4])
    converted = scratch / "optimum-fp32"
    if not (converted / "config.json").is_file():
        load_marian(model).save_pretrained(scratch / "marian")
        ORTModelForSeq2SeqLM.from_pretrained(scratch / "marian", export=True).save_pretrained(converted)
    torch.set_num_threads(threads)
    serve(["optimum-onnx", "onnxruntime", "transformers"], lambda: _load(converted, threads))


def _load(folder: Path, threads: int) -> Contestant:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    model = ORTModelForSeq2SeqLM.from_pretrained(folder, session_options=options)

    @torch.inference_mode()
    def generate(beam_size: int, sources: Batch, new_tokens: int) -> Batch:
        longest = max(map(len, sources))
        padded = [source + [PAD_ID] * (longest - len(source)) for source in sources]
        mask = [[1] * len(source) + [0] * (longest - len(source)) for source in sources]
        config = GenerationConfig(
            max_new_tokens=new_tokens,
            min_new_tokens=new_tokens,
            do_sample=False,
            num_beams=beam_size,
            bos_token_id=BOS_ID,
            eos_token_id=EOS_ID,
            pad_token_id=PAD_ID,
            decoder_start_token_id=BOS_ID,
        )
        output = model.generate(
            input_ids=torch.tensor(padded), attention_mask=torch.tensor(mask), generation_config=config
        )  # (B, 1 + new_tokens)
        answers: list[list[int]] = output[:, 1:].tolist()
        return answers

    def ways(_batch: Batch, beam_size: int) -> Mapping[str, Generate]:
        return {"merged decoder": partial(generate, beam_size)}

    return Contestant(ways)


if __name__ == "__main__":
    main()
