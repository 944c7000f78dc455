"""`generate` of transformers, greedy, on PyTorch.

python run_transformers.py MODEL_FOLDER BUNDLE_FOLDER SCRATCH_FOLDER THREADS fp32|bf16
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import torch
from gpt2 import load_gpt2
from transformers import GenerationConfig
from worker import Batch, Contestant, Generate, serve

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_CACHES = {"dynamic cache": None, "static cache": "static"}


def main() -> None:
    """Answers requests."""
    model, threads, dtype = Path(sys.argv[1]), int(sys.argv[4]), sys.argv[5]
    torch.set_num_threads(threads)
    serve(["transformers", "torch"], lambda: _load(model, _DTYPES[dtype]))


def _load(folder: Path, dtype: torch.dtype) -> Contestant:
    model = load_gpt2(folder).to(dtype)

    @torch.inference_mode()
    def generate(cache: str | None, prompts: Batch, new_tokens: int) -> Batch:
        longest = max(map(len, prompts))
        padded = [[0] * (longest - len(prompt)) + prompt for prompt in prompts]  # on the left
        mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
        config = GenerationConfig(
            max_new_tokens=new_tokens, do_sample=False, pad_token_id=0, cache_implementation=cache
        )
        output = model.generate(
            torch.tensor(padded), attention_mask=torch.tensor(mask), generation_config=config
        )  # (B, longest + new_tokens)
        answers: list[list[int]] = output[:, longest:].tolist()
        return answers

    def ways(_batch: Batch, _beam_size: int) -> Mapping[str, Generate]:
        return {name: partial(generate, cache) for name, cache in _CACHES.items()}

    return Contestant(ways)


if __name__ == "__main__":
    main()
