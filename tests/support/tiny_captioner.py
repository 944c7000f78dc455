"""A tiny model that says which colour an image has, in two languages, as a checkpoint."""

from io import BytesIO
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch.nn import functional

from headway_training.checkpoint import (
    IMAGE_EVALUATION_FILE,
    Checkpoint,
    Evaluation,
    ImagePreprocessing,
    write_checkpoint,
)
from headway_training.data.images import normalize
from headway_training.evaluation import pad
from headway_training.models import Captioner, CaptionerConfig
from headway_training.recipes import TokenizerSettings
from headway_training.tokenizers import special_tokens, train_tokenizer

COLOURS = {"red": (200, 30, 30), "green": (30, 200, 30), "blue": (30, 30, 200)}
CAPTIONS = {
    "en": {name: f"a wall that is {name}" for name in COLOURS},
    "de": {"red": "eine rote Wand", "green": "eine grüne Wand", "blue": "eine blaue Wand"},
}
SIDE, GRID = 32, 4
PREPROCESSING = ImagePreprocessing(
    height=SIDE, width=SIDE, resize="stretch", interpolation="bilinear", mean=(0.5,) * 3, std=(0.3,) * 3
)
VOCABULARY = 295
_STEPS = 60


def picture(colour: str, size: tuple[int, int] = (SIDE, SIDE)) -> bytes:
    """A PNG of one colour."""
    file = BytesIO()
    Image.new("RGB", size, COLOURS[colour]).save(file, "PNG")
    return file.getvalue()


def shape(vocabulary_size: int) -> CaptionerConfig:
    """The model's configuration."""
    return CaptionerConfig(
        image_size=SIDE,
        patch_size=SIDE // GRID,
        image_num_layers=1,
        image_d_model=16,
        image_num_heads=2,
        image_d_ff=32,
        vocabulary_size=vocabulary_size,
        max_target_length=24,
        num_layers=2,
        d_model=32,
        num_heads=2,
        d_ff=64,
    )


def build() -> Captioner:
    """The model as a user's own module."""
    return Captioner(shape(VOCABULARY))


def captioner_checkpoint(folder: Path) -> Path:
    """Trains the model and writes it."""
    torch.manual_seed(0)
    texts = [text for captions in CAPTIONS.values() for text in captions.values()]
    tokenizer = train_tokenizer(
        texts, TokenizerSettings(vocabulary_size=VOCABULARY, min_frequency=1), "captioning", ["<en>", "<de>"]
    )
    special, marks = special_tokens(tokenizer), {one: tokenizer.token_to_id(f"<{one}>") for one in CAPTIONS}
    assert tokenizer.get_vocab_size() == VOCABULARY
    configuration = shape(tokenizer.get_vocab_size())
    model = Captioner(configuration)
    images = np.stack([np.full((SIDE, SIDE, 3), colour, np.uint8) for colour in COLOURS.values()])
    pixels = torch.from_numpy(normalize(images, PREPROCESSING))
    pairs = [(one, CAPTIONS[one][name]) for name in COLOURS for one in CAPTIONS]
    rows = [(marks[one], tokenizer.encode(text, add_special_tokens=False).ids) for one, text in pairs]
    read = pad([[special.bos, mark, *ids] for mark, ids in rows], special.pad).unflatten(0, (len(COLOURS), -1))
    targets = pad([[-100, *ids, special.eos] for _, ids in rows], -100)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for _ in range(_STEPS):
        noisy = pixels + 0.1 * torch.randn_like(pixels)
        loss = functional.cross_entropy(model(read, noisy).flatten(0, -2), targets.flatten(), ignore_index=-100)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    checkpoint = Checkpoint(
        name="colours",
        task="captioning",
        description="Says which colour an image has.",
        license="Apache-2.0",
        architecture="captioner",
        configuration=configuration.to_dict(),
        special_tokens=special,
        language_tokens=marks,
        image_preprocessing=PREPROCESSING,
        evaluation=Evaluation(
            file=IMAGE_EVALUATION_FILE, dataset="three colours", metric="cider", higher_is_better=True
        ),
    )
    captions = np.array([[[CAPTIONS[one][name]] for one in CAPTIONS] for name in COLOURS])
    arrays = {"images": images, "languages": np.array(list(CAPTIONS)), "captions": captions}
    write_checkpoint(folder, checkpoint, model.eval(), tokenizer=tokenizer, arrays=arrays)
    return folder
