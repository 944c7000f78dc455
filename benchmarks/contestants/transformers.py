"""`generate` of transformers on PyTorch: python -m benchmarks.contestants.transformers THREADS fp32|bf16."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig

from benchmarks.contestants.checkpoints import BOS_ID, EOS_ID, PAD_ID, load_gpt2, load_marian
from benchmarks.contestants.in_process import Batch, Case, Fastest, Run, decoding_batches, run_decoding
from benchmarks.worker import serve

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_models: dict[str, Any] = {}


def _ways(dtype: torch.dtype, case: Case, callers: int) -> Mapping[str, Run]:
    folder, translates = case["weights"], case["task"] == "translate"
    if folder not in _models:
        _models[folder] = (load_marian if translates else load_gpt2)(Path(folder)).to(dtype)
    batches, limits = decoding_batches(case, callers)
    if translates:
        generate = partial(translate, _models[folder], case["beam_size"])
        return {"dynamic cache": run_decoding(generate, batches, limits)}
    caches = {"dynamic cache": None, "static cache": "static"}
    return {
        name: run_decoding(partial(_continue, _models[folder], cache), batches, limits)
        for name, cache in caches.items()
    }


@torch.inference_mode()
def _continue(model: Any, cache: str | None, prompts: Batch, new_tokens: int) -> Batch:
    longest = max(map(len, prompts))
    padded = [[0] * (longest - len(prompt)) + prompt for prompt in prompts]  # on the left
    mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    config = GenerationConfig(max_new_tokens=new_tokens, do_sample=False, pad_token_id=0, cache_implementation=cache)
    output = model.generate(torch.tensor(padded), attention_mask=torch.tensor(mask), generation_config=config)
    answers: Batch = output[:, longest:].tolist()  # (B, longest + new_tokens)
    return answers


@torch.inference_mode()
def translate(model: Any, beam_size: int, sources: Batch, new_tokens: int) -> Batch:
    """Translates a batch by the `generate` that a model has of transformers: exactly so many new tokens each."""
    longest = max(map(len, sources))
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
        input_ids=torch.tensor([source + [PAD_ID] * (longest - len(source)) for source in sources]),
        attention_mask=torch.tensor([[1] * len(source) + [0] * (longest - len(source)) for source in sources]),
        generation_config=config,
    )  # (B, 1 + new_tokens)
    answers: Batch = output[:, 1:].tolist()
    return answers


if __name__ == "__main__":
    torch.set_num_threads(int(sys.argv[1]))
    serve(Fastest(partial(_ways, _DTYPES[sys.argv[2]])).answer, ["transformers", "torch"])
