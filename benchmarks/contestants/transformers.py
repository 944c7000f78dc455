"""`generate` of transformers on PyTorch: python -m benchmarks.contestants.transformers THREADS fp32|bf16.

Its models have the sizes of the benchmark's random models, and random weights of their own.
"""

import json
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, GPT2Config, GPT2LMHeadModel, MarianConfig, MarianMTModel

from benchmarks.contestants.in_process import Batch, Case, Fastest, Run, decoding_run
from benchmarks.worker import serve

BOS_ID, EOS_ID, PAD_ID = 0, 1, 2
"""Of the translation model; the last one stands where a sentence of a batch has ended, and no sentence has it."""


def _load(dtype: torch.dtype, case: Case) -> Any:
    make = make_marian if case["task"] == "translation" else make_gpt2
    return make(Path(case["weights"])).to(dtype)


def _ways(model: Any, case: Case, callers: int) -> Mapping[str, Run]:
    if case["task"] == "translation":
        return {"dynamic cache": decoding_run(case, callers, partial(translate, model, case["beam_size"]))}
    caches = {"dynamic cache": None, "static cache": "static"}
    return {name: decoding_run(case, callers, partial(_continue, model, cache)) for name, cache in caches.items()}


def make_gpt2(folder: Path) -> GPT2LMHeadModel:
    """Makes a GPT-2 in fp32 with the sizes in a folder."""
    sizes = json.loads((folder / "sizes.json").read_text(encoding="utf-8"))
    torch.manual_seed(1)
    config = GPT2Config(
        vocab_size=sizes["vocabulary_size"],
        n_positions=sizes["max_length"],
        n_embd=sizes["d_model"],
        n_layer=sizes["num_layers"],
        n_head=sizes["num_heads"],
        n_inner=sizes["d_ff"],
        activation_function="gelu",  # headway's: exact, not by tanh
        bos_token_id=None,
        eos_token_id=None,
    )
    return GPT2LMHeadModel(config).eval()


def make_marian(folder: Path) -> MarianMTModel:
    """Makes a Transformer in fp32 with the sizes in a folder."""
    sizes = json.loads((folder / "sizes.json").read_text(encoding="utf-8"))
    torch.manual_seed(1)
    names = {"layers": "num_layers", "attention_heads": "num_heads", "ffn_dim": "d_ff"}
    config = MarianConfig(
        **{f"{side}_{theirs}": sizes[ours] for side in ("encoder", "decoder") for theirs, ours in names.items()},
        vocab_size=sizes["vocabulary_size"],
        d_model=sizes["d_model"],
        max_position_embeddings=sizes["max_length"],
        activation_function="relu",
        scale_embedding=True,
        dropout=0.0,
        bos_token_id=BOS_ID,
        eos_token_id=EOS_ID,
        pad_token_id=PAD_ID,
        decoder_start_token_id=BOS_ID,
        forced_eos_token_id=None,
    )
    return MarianMTModel(config).eval()


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
    padded = torch.tensor([source + [PAD_ID] * (longest - len(source)) for source in sources])
    mask = torch.tensor([[1] * len(source) + [0] * (longest - len(source)) for source in sources])
    output = model.generate(input_ids=padded, attention_mask=mask, generation_config=config)  # (B, 1 + new_tokens)
    answers: Batch = output[:, 1:].tolist()
    return answers


if __name__ == "__main__":
    torch.set_num_threads(int(sys.argv[1]))
    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16}
    serve(Fastest(partial(_load, dtypes[sys.argv[2]]), _ways).answer, ["transformers", "torch"])
