"""transformers on PyTorch, eager and compiled: python -m benchmarks.contestants.transformers THREADS fp32|bf16.

Its models are the folders that headway imports; for the random models of the other benchmarks, models of the same sizes
with random weights of their own. A decoder runs with a dynamic cache, a static one, or a static one with its steps
compiled; a classifier runs on prepared inputs, texts sorted by length.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    CompileConfig,
    GenerationConfig,
    GPT2Config,
    GPT2LMHeadModel,
    MarianConfig,
    MarianMTModel,
)

from benchmarks.contestants.classifier import Inputs
from benchmarks.contestants.in_process import Batch, Case, Fastest, Run, classifying_ways, decoding_run
from benchmarks.worker import serve

_KINDS: dict[str, Any] = {
    "generation": AutoModelForCausalLM,
    "translation": AutoModelForSeq2SeqLM,
    "text_classification": AutoModelForSequenceClassification,
    "image_classification": AutoModelForImageClassification,
}
BOS_ID, EOS_ID, PAD_ID = 0, 1, 2
"""Of the translation model; the last one stands where a sentence of a batch has ended, and no sentence has it."""
_GPT2_SIZES = {
    "vocab_size": "vocabulary_size",
    "n_positions": "max_length",
    "n_embd": "d_model",
    "n_layer": "num_layers",
    "n_head": "num_heads",
    "n_inner": "d_ff",
}
_MARIAN_SIZES = {"vocab_size": "vocabulary_size", "max_position_embeddings": "max_length", "d_model": "d_model"} | {
    f"{side}_{theirs}": ours
    for side in ("encoder", "decoder")
    for theirs, ours in {"layers": "num_layers", "attention_heads": "num_heads", "ffn_dim": "d_ff"}.items()
}
"""Names that transformers has for sizes."""


def make_model(case: Case) -> Any:
    """Makes a GPT-2, or a Transformer for translation (Marian), in fp32 with the sizes of a case; or reads a folder."""
    if (Path(case["weights"]) / "config.json").is_file():
        return _KINDS[case["task"]].from_pretrained(case["weights"], dtype=torch.float32).eval()
    sizes = json.loads((Path(case["weights"]) / "sizes.json").read_text(encoding="utf-8"))
    torch.manual_seed(1)
    if case["task"] == "generation":
        named = {theirs: sizes[ours] for theirs, ours in _GPT2_SIZES.items()}
        # The activation is headway's: exact, not by tanh.
        config = GPT2Config(**named, activation_function="gelu", bos_token_id=None, eos_token_id=None)
        return GPT2LMHeadModel(config).eval()
    named = {theirs: sizes[ours] for theirs, ours in _MARIAN_SIZES.items()}
    tokens = {"bos_token_id": BOS_ID, "eos_token_id": EOS_ID, "pad_token_id": PAD_ID, "decoder_start_token_id": BOS_ID}
    options = {"activation_function": "relu", "scale_embedding": True, "dropout": 0.0, "forced_eos_token_id": None}
    return MarianMTModel(MarianConfig(**named, **tokens, **options)).eval()


def _ways(model: Any, case: Case, callers: int) -> Mapping[str, Run]:
    if case["task"].endswith("classification"):
        return _classifying_ways(model, case, callers)
    ways: dict[str, dict[str, Any]] = {"dynamic cache": {}}
    if case["task"] == "generation":
        compiles = CompileConfig(mode="default", fullgraph=False)
        compiles._compile_all_devices = True  # noqa: SLF001 (there is no other way to compile for a processor)
        static = {"cache_implementation": "static"}
        ways |= {"static cache": static | {"disable_compile": True}}
        ways |= {"static cache, torch.compile": static | {"compile_config": compiles}}
    return {
        name: decoding_run(case, callers, partial(generate, model, case["beam_size"], options))
        for name, options in ways.items()
    }


def _classifying_ways(model: Any, case: Case, callers: int) -> Mapping[str, Run]:
    inputs = Inputs(Path(case["bundle"]))
    items = [inputs.prepare(one) for one in case["texts"] or case["images"]]

    def collate(some: Sequence[Any]) -> dict[str, torch.Tensor]:
        tensors = {name: torch.from_numpy(array) for name, array in inputs.collate(some).items()}
        return {name: one.to(model.dtype) if one.is_floating_point() else one for name, one in tensors.items()}

    ways: dict[str, Run] = {}
    for name, forward in {"eager": model, "torch.compile": torch.compile(model, dynamic=True)}.items():
        run = torch.inference_mode()(partial(_forward, forward))
        found = classifying_ways(items, callers, collate=collate, run=run, orders=("sorted",))
        ways |= {f"{name}, {way}": run for way, run in found.items()}
    return ways


def _forward(model: Any, feeds: dict[str, torch.Tensor]) -> None:
    model(**feeds)


@torch.inference_mode()
def generate(model: Any, beam_size: int, options: dict[str, Any], texts: Batch, new_tokens: int) -> Batch:
    """Gives exactly so many new tokens for each text of a batch.

    Prompts are padded on the left and stand before their answers; sources of translations are padded on the right, and
    the first token of a translation is the one that begins it.
    """
    translates = model.config.is_encoder_decoder
    longest = max(map(len, texts))

    def pad(ids: list[int], filler: int) -> list[int]:
        gap = [filler] * (longest - len(ids))
        return ids + gap if translates else gap + ids

    input_ids = torch.tensor([pad(ids, PAD_ID) for ids in texts])
    mask = torch.tensor([pad([1] * len(ids), 0) for ids in texts])
    named = {"bos_token_id": BOS_ID, "eos_token_id": EOS_ID, "decoder_start_token_id": BOS_ID, "num_beams": beam_size}
    config = GenerationConfig(
        max_new_tokens=new_tokens,
        min_new_tokens=new_tokens if translates else None,
        do_sample=False,
        pad_token_id=PAD_ID,
        **options,
        **(named if translates else {}),
    )
    output = model.generate(input_ids, attention_mask=mask, generation_config=config)
    answers: Batch = output[:, 1 if translates else longest :].tolist()
    return answers


if __name__ == "__main__":
    torch.set_num_threads(int(sys.argv[1]))
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[sys.argv[2]]
    serve(Fastest(lambda case: make_model(case).to(dtype), _ways).answer, ["transformers", "torch"])
