"""A tiny Bark of `transformers` with random weights, in a folder as it is published."""

import json
from pathlib import Path

import numpy as np
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

WORDS = ("[PAD]", "[UNK]", "the", "cat", "sat", "on", "a", "mat", "and", "sang", "to", "its", "dog")
SEMANTIC, BOOK, BOOKS, INPUT = 20, 16, 4, 16
STAGE = {"num_layers": 2, "num_heads": 2, "hidden_size": 16, "dropout": 0.0}
GENERATION = {
    "semantic_config": {
        "eos_token_id": SEMANTIC,
        "semantic_vocab_size": SEMANTIC,
        "max_new_tokens": 40,
        "text_encoding_offset": 24,
        "text_pad_token": 60,
        "semantic_infer_token": 63,
        "max_input_semantic_length": INPUT,
        "do_sample": True,
        "temperature": 0.7,
        "min_eos_p": 0.08,
    },
    "coarse_acoustics_config": {
        "coarse_semantic_pad_token": SEMANTIC + 2 * BOOK,
        "coarse_infer_token": SEMANTIC + 2 * BOOK + 1,
        "max_coarse_input_length": 12,
        "max_coarse_history": 20,
        "sliding_window_len": 6,
        "do_sample": True,
        "temperature": 0.6,
    },
    "fine_acoustics_config": {
        "temperature": 0.5,
        "max_fine_history_length": 12,
        "max_fine_input_length": 24,
        "n_fine_codebooks": BOOKS,
    },
    "sample_rate": 24_000,
    "codebook_size": BOOK,
}


def config():
    """The configuration of the model."""
    return transformers.BarkConfig(
        semantic_config={**STAGE, "input_vocab_size": 64, "output_vocab_size": 24, "block_size": 56, "bias": False},
        coarse_acoustics_config={
            **STAGE,
            "input_vocab_size": 56,
            "output_vocab_size": SEMANTIC + 2 * BOOK,
            "block_size": 40,
            "bias": False,
        },
        fine_acoustics_config={
            **STAGE,
            "input_vocab_size": BOOK + 2,
            "output_vocab_size": BOOK + 2,
            "block_size": 24,
            "n_codes_total": BOOKS,
            "n_codes_given": 1,
        },
        codec_config={
            "model_type": "encodec",
            "upsampling_ratios": [4, 2],
            "num_filters": 4,
            "hidden_size": 8,
            "codebook_size": BOOK,
            "codebook_dim": 8,
            "target_bandwidths": [120.0],
            "num_lstm_layers": 2,
        },
    )


def prompts(seed: int, frames: int = 30) -> dict[str, np.ndarray]:
    """A history prompt."""
    random = np.random.default_rng(seed)
    return {
        "semantic_prompt": random.integers(0, SEMANTIC, 21),
        "coarse_prompt": random.integers(0, BOOK, (2, frames)),
        "fine_prompt": random.integers(0, BOOK, (BOOKS, frames)),
    }


def write_bark(folder: Path, seed: int = 3, voices: bool = True, **changes) -> Path:
    """Writes a folder with two voices: one in files that are named, and one of a file."""
    torch.manual_seed(seed)
    model = transformers.BarkModel(config()).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not name.startswith("codec"):
                parameter.add_(0.3 * torch.randn_like(parameter))
        for layer in model.codec_model.quantizer.layers:
            layer.codebook.embed.copy_(torch.randn_like(layer.codebook.embed))
        model.codec_model.decoder.layers[-1].conv.parametrizations.weight.original0.mul_(0.3)
    settings = {part: dict(value) if isinstance(value, dict) else value for part, value in GENERATION.items()}
    for part, value in changes.items():
        settings[part] = settings[part] | value if isinstance(value, dict) else value
    model.generation_config = transformers.GenerationConfig()  # the own class cannot be saved
    model.save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps(settings))
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, "[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]"
    ).save_pretrained(folder)
    if voices:
        (folder / "speaker_embeddings").mkdir()
        paths = {}
        for name, array in prompts(1).items():
            paths[name] = f"speaker_embeddings/en_speaker_1_{name}.npy"
            np.save(folder / paths[name], array)
        (folder / "speaker_embeddings_path.json").write_text(
            json.dumps({"repo_or_path": "somewhere", "v2/en_speaker_1": paths})
        )
        np.savez(folder / "speaker_embeddings" / "own.npz", **prompts(5, frames=7))
    return folder
