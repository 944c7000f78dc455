"""A tiny model that draws squares of three colours, trained for seconds, so that what it draws is worth looking at."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from headway_training.checkpoint import Checkpoint, ImagePreprocessing, load_model, write_checkpoint
from headway_training.evaluation import pad, token_mask
from headway_training.models import Autoencoder, LatentDiffusion, LatentDiffusionConfig
from headway_training.models.diffusion import mix
from headway_training.recipes.settings import TokenizerSettings
from headway_training.tokenizers import encode_texts, special_tokens, train_tokenizer

SEED = 7
SIDE = 8
COLOURS = {"red": (220, 40, 40), "green": (40, 200, 60), "blue": (40, 60, 210)}
SHAPE = LatentDiffusionConfig(
    image_size=SIDE,
    num_halvings=1,
    d_latent=4,
    width=16,
    num_layers=2,
    d_model=32,
    num_heads=2,
    d_ff=64,
    num_classes=len(COLOURS),
)
TEXT_SHAPE = replace(SHAPE, num_classes=0, vocabulary_size=300, max_length=12, text_num_layers=1)
TEXTS = [f"a {colour} square" for colour in COLOURS]


def draw_squares(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Pixels (N, SIDE, SIDE, 3) of squares on grey, and their colours' numbers (N,)."""
    random = np.random.default_rng(seed)
    labels = np.arange(count) % len(COLOURS)
    images = np.full((count, SIDE, SIDE, 3), 128, np.uint8)
    for image, label in zip(images, labels, strict=True):
        top, left = random.integers(0, 3, 2)
        image[top : top + 6, left : left + 6] = tuple(COLOURS.values())[label]
    return images, labels


def write_diffusion_checkpoint(folder: Path, num_steps: int = 150) -> Path:
    """Trains the autoencoder, then the denoiser, and writes the checkpoint of both."""
    torch.manual_seed(SEED)
    model = LatentDiffusion(SHAPE)
    images, labels = (torch.from_numpy(array) for array in draw_squares(240, SEED))
    colours = images.permute(0, 3, 1, 2).float() / 255
    pixels = (colours - 0.5) / 0.5
    _fit_autoencoder(model, pixels, colours, num_steps)
    with torch.no_grad():
        model.scale_latents(model.encoder(pixels)[0])
        latents = model.encode(pixels)
    _fit_denoiser(model, latents, labels, num_steps)
    described = Checkpoint(
        name="squares",
        task="image_generation",
        description="Draws squares.",
        license="Apache-2.0",
        architecture="latent_diffusion",
        configuration=SHAPE.to_dict(),
        labels=tuple(COLOURS),
        image_preprocessing=ImagePreprocessing(height=SIDE, width=SIDE, mean=(0.5,) * 3, std=(0.5,) * 3),
        evaluation={
            "file": "evaluation.npz",
            "dataset": "squares",
            "metric": "velocity_error",
            "higher_is_better": False,
        },
    )
    write_checkpoint(folder, described, model.eval(), images=draw_squares(24, SEED + 1))
    return folder


def write_text_diffusion_checkpoint(folder: Path, labels_checkpoint: Path, num_steps: int = 150) -> Path:
    """Trains a denoiser of texts on the other checkpoint's autoencoder, and writes the checkpoint of both."""
    torch.manual_seed(SEED)
    model = LatentDiffusion(TEXT_SHAPE)
    known, described = load_model(labels_checkpoint)
    for part in ("encoder", "decoder"):
        getattr(model, part).load_state_dict(getattr(known, part).state_dict())
    model.latent_mean, model.latent_std = known.latent_mean, known.latent_std
    tokenizer = train_tokenizer(TEXTS * 2, TokenizerSettings(vocabulary_size=300), "image_generation")
    images, labels = draw_squares(240, SEED)
    with torch.no_grad():
        latents = model.encode((torch.from_numpy(images).permute(0, 3, 1, 2).float() / 255 - 0.5) / 0.5)
    _fit_denoiser(model, latents, torch.from_numpy(labels), num_steps, encode_texts(tokenizer, [*TEXTS, ""], None))
    images, labels = draw_squares(24, SEED + 1)
    changed = {
        "name": "text-squares",
        "configuration": TEXT_SHAPE.to_dict(),
        "labels": (),
        "special_tokens": special_tokens(tokenizer),
    }
    arrays = {"images": images, "texts": np.array([TEXTS[label] for label in labels])}
    described = described.model_copy(update=changed)
    write_checkpoint(folder, described, model.eval(), tokenizer=tokenizer, arrays=arrays)
    return folder


def _fit_autoencoder(model: Autoencoder, pixels: torch.Tensor, colours: torch.Tensor, num_steps: int) -> None:
    optimizer = torch.optim.AdamW([*model.encoder.parameters(), *model.decoder.parameters()], lr=4e-3)
    for _ in range(num_steps):
        rows = torch.randint(len(pixels), (32,))
        found, divergence = model(pixels[rows], torch.randn(32, *SHAPE.latent_shape))
        _step(optimizer, (found - colours[rows]).square().mean() + 1e-3 * divergence.mean())


def _fit_denoiser(
    model: LatentDiffusion,
    latents: torch.Tensor,
    labels: torch.Tensor,
    num_steps: int,
    texts: list[list[int]] | None = None,
) -> None:
    """Trains a denoiser of labels, or of the tokens of their texts and of the empty one."""
    parameters = [*model.denoiser.parameters(), *(model.text_encoder.parameters() if texts else ())]
    optimizer = torch.optim.AdamW(parameters, lr=4e-3)
    for _ in range(num_steps):
        rows, times = torch.randint(len(latents), (64,)), torch.rand(64)
        mixed, velocity = mix(latents[rows], torch.randn(64, *SHAPE.latent_shape), times)
        shown = torch.where(torch.rand(64) < 0.1, len(COLOURS), labels[rows])
        condition = (shown,)
        if texts:
            ids, mask = pad(texts, 0)[shown], token_mask(texts)[shown]
            condition = (model.text_encoder(ids, mask), mask)
        _step(optimizer, (model.denoiser(mixed, times, *condition) - velocity).square().mean())


def _step(optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> None:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
