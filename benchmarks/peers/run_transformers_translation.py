"""`generate` of transformers, translating, on PyTorch.

python run_transformers_translation.py MODEL_FOLDER BUNDLE_FOLDER SCRATCH_FOLDER THREADS fp32|bf16
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import torch
from marian import BOS_ID, EOS_ID, PAD_ID, load_marian
from transformers import GenerationConfig
from worker import Batch, Contestant, Generate, serve

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def main() -> None:
    """Answers requests."""
    model, threads, dtype = Path(sys.argv[1]), int(sys.argv[4]), sys.argv[5]
    torch.set_num_threads(threads)
    serve(["transformers", "torch"], lambda: _load(model, _DTYPES[dtype]))


def _load(folder: Path, dtype: torch.dtype) -> Contestant:
    model = load_marian(folder).to(dtype)

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
            torch.tensor(padded), attention_mask=torch.tensor(mask), generation_config=config
        )  # (B, 1 + new_tokens)
        answers: list[list[int]] = output[:, 1:].tolist()
        return answers

    def ways(_batch: Batch, beam_size: int) -> Mapping[str, Generate]:
        return {"dynamic cache": partial(generate, beam_size)}

    return Contestant(ways)


if __name__ == "__main__":
    main()
