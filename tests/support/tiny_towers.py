"""A model of two towers with random weights, as a checkpoint."""

from pathlib import Path

import numpy as np
import torch

from headway_training.checkpoint import (
    Checkpoint,
    Evaluation,
    ImagePreprocessing,
    write_checkpoint,
)
from headway_training.models import build_model
from headway_training.recipes import TokenizerSettings
from headway_training.tokenizers import special_tokens, train_tokenizer

TEXTS = ["a red wall", "a blue house by the sea", "two dogs", "a dog and a cat run over the green grass"]
CONFIGURATION = {
    "d_space": 16,
    "loss": "sigmoid",
    "image_size": 16,
    "patch_size": 8,
    "stem": "convolutions",
    "image_num_layers": 1,
    "image_d_model": 32,
    "image_num_heads": 2,
    "image_d_ff": 64,
    "max_length": 24,
    "text_num_layers": 1,
    "text_d_model": 32,
    "text_num_heads": 2,
    "text_d_ff": 64,
}


def towers_checkpoint(folder: Path) -> Path:
    """Writes it."""
    tokenizer = train_tokenizer(TEXTS, TokenizerSettings(vocabulary_size=300), "image_text_embedding")
    configuration = {**CONFIGURATION, "vocabulary_size": tokenizer.get_vocab_size()}
    torch.manual_seed(0)
    model = build_model("clip", configuration)
    checkpoint = Checkpoint(
        name="tiny-clip",
        task="image_text_embedding",
        description="Puts images and texts into one space.",
        license="none",
        architecture="clip",
        configuration=configuration,
        special_tokens=special_tokens(tokenizer),
        image_preprocessing=ImagePreprocessing(height=16, width=16, mean=(0.5, 0.5, 0.5), std=(0.3, 0.3, 0.3)),
        evaluation=Evaluation(
            file="evaluation.jsonl", dataset="tiny pairs", metric="mean_recall", higher_is_better=True
        ),
    )
    images = np.random.default_rng(0).integers(0, 255, (4, 16, 16, 3), np.uint8)
    texts = [{"text": text, "label": number} for number, text in enumerate(TEXTS)]
    write_checkpoint(folder, checkpoint, model, tokenizer=tokenizer, texts=texts, images=(images, np.arange(4)))
    return folder
