"""Tiny models of the kit, trained for seconds, so that what they answer is varied and worth comparing token by token.

Each function writes a whole checkpoint (docs/checkpoint.md) and returns its folder.
"""

import random
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from torch import nn
from torch.nn import functional

from headway_training.checkpoint import Checkpoint, write_checkpoint
from headway_training.data.examples import Span
from headway_training.models import build_model
from headway_training.tagging import TagScheme, find_subwords, subword_tags

SEED = 7
PROVERBS = (
    "a bird in the hand is worth two in the bush. the early bird catches the worm. actions speak louder than words. "
    "all that glitters is not gold. better late than never. birds of a feather flock together. fortune favours the "
    "bold. look before you leap. the pen is mightier than the sword. when in rome, do as the romans do. practice makes "
    "perfect. "
)
NUMBERS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
ZAHLEN = ["eins", "zwei", "drei", "vier", "fünf", "sechs", "sieben", "acht", "neun", "zehn"]
WARM, COLD = ("sun", "fire", "summer", "desert"), ("snow", "ice", "winter", "glacier")
ADJECTIVES, ANIMALS, TOWNS = ("brown", "lazy", "quick"), ("dog", "fox", "owl"), ("bath", "york", "oslo")
FILLERS = ("the", "near", "a", "of", "under", "old", "bright", "long")
LLAMA_PARTS: dict[str, object] = {
    "num_kv_heads": 1,
    "norm_kind": "rms_norm",
    "norm_eps": 1e-6,
    "activation": "silu",
    "gated": True,
    "biases": False,
    "positions": "rotary",
}
"""Fields that make a model of the kit a Llama; its query heads share one key and value head."""


def generation_checkpoint(
    folder: Path,
    name: str = "tiny-generation",
    num_batches: int = 250,
    *,
    architecture: str = "gpt",
    **fields: object,
) -> Path:
    """A character model that has learned a page of proverbs by heart; fields add to its configuration."""
    torch.manual_seed(SEED)
    characters = [*sorted(set(PROVERBS)), "é", "€"]
    tokenizer = Tokenizer(models.WordLevel({character: index for index, character in enumerate(characters)}, "e"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    configuration = {
        "vocabulary_size": len(characters),
        "max_length": 160,
        "num_layers": 2,
        "d_model": 64,
        "num_heads": 4,
        "d_ff": 128,
        **fields,
    }
    model = build_model(architecture, configuration)
    ids = torch.tensor(tokenizer.encode(PROVERBS * 2).ids)
    starts = np.random.default_rng(SEED).integers(0, len(ids) - 160, (num_batches, 6))
    batches = [[ids[start : start + 160] for start in row] for row in starts]
    _train(model, batches, _next_token_loss, learning_rate=1e-2)
    checkpoint = _checkpoint(
        name,
        "generation",
        architecture,
        configuration,
        special_tokens={},
        evaluation={
            "file": "evaluation.jsonl",
            "dataset": "proverbs",
            "metric": "nats_per_character",
            "higher_is_better": False,
        },
    )
    write_checkpoint(folder, checkpoint, model, tokenizer=tokenizer, texts=[{"text": PROVERBS}])
    return folder


def translation_checkpoint(folder: Path) -> Path:
    """Translates numbers, word by word and in reverse order."""
    torch.manual_seed(SEED)
    vocabulary = ["<pad>", "<s>", "</s>", "<unk>", *NUMBERS, *ZAHLEN]
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(vocabulary)}, "<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 2)])
    tokenizer.add_special_tokens(["<pad>", "<s>", "</s>"])
    configuration = {
        "vocabulary_size": len(vocabulary),
        "max_source_length": 24,
        "max_target_length": 24,
        "num_encoder_layers": 1,
        "num_decoder_layers": 2,
        "d_model": 64,
        "num_heads": 4,
        "d_ff": 128,
    }
    model = build_model("transformer", configuration)
    generator = random.Random(SEED)
    pairs = [_number_pair(generator) for _ in range(14_000)]

    def loss(batch: list[tuple[str, str]]) -> torch.Tensor:
        source = _pad([tokenizer.encode(source).ids for source, _ in batch])
        target = _pad([[1, *tokenizer.encode(target).ids] for _, target in batch])
        logits = model(source, (source != 0).long(), target[:, :-1])
        return functional.cross_entropy(logits.flatten(0, 1), target[:, 1:].flatten(), ignore_index=0)

    batches = [pairs[start : start + 64] for start in range(0, len(pairs), 64)]
    _train(model, batches, loss, learning_rate=4e-3)
    checkpoint = _checkpoint(
        "tiny-translation",
        "translation",
        "transformer",
        configuration,
        special_tokens={"pad": 0, "bos": 1, "eos": 2, "unk": 3},
        languages={"source": "en", "target": "de"},
        evaluation={
            "file": "evaluation.jsonl",
            "dataset": "numbers",
            "metric": "sacrebleu",
            "higher_is_better": True,
        },
    )
    texts = [{"source": source, "target": target} for source, target in pairs[:100]]
    write_checkpoint(folder, checkpoint, model, tokenizer=tokenizer, texts=texts)
    return folder


def classification_checkpoint(folder: Path) -> Path:
    """Tells warm texts from cold ones by their words."""
    torch.manual_seed(SEED)
    vocabulary = ["[PAD]", "[CLS]", "[UNK]", *WARM, *COLD, *FILLERS]
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(vocabulary)}, "[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(single="[CLS] $A", special_tokens=[("[CLS]", 1)])
    configuration = {
        "vocabulary_size": len(vocabulary),
        "max_length": 40,
        "num_layers": 2,
        "d_model": 64,
        "num_heads": 4,
        "d_ff": 128,
        "head": "sequence",
        "num_classes": 2,
    }
    model = build_model("encoder", configuration)
    generator = random.Random(SEED)
    rows = [_weather_report(generator) for _ in range(2_000)]

    def loss(batch: list[tuple[str, int]]) -> torch.Tensor:
        ids = _pad([tokenizer.encode(text).ids for text, _ in batch])
        return functional.cross_entropy(model(ids, (ids != 0).long()), torch.tensor([label for _, label in batch]))

    _train(model, [rows[start : start + 32] for start in range(0, len(rows), 32)], loss, learning_rate=2e-3)
    checkpoint = _checkpoint(
        "tiny-classification",
        "text_classification",
        "encoder",
        configuration,
        special_tokens={"pad": 0, "unk": 2},
        labels=["warm", "cold"],
        evaluation={
            "file": "evaluation.jsonl",
            "dataset": "weather",
            "metric": "accuracy",
            "higher_is_better": True,
        },
    )
    texts = [{"text": text, "label": label} for text, label in rows[:200]]
    write_checkpoint(folder, checkpoint, model, tokenizer=tokenizer, texts=texts)
    return folder


def token_checkpoint(folder: Path) -> Path:
    """Finds animals, with the adjectives right before them, and towns, after "in" alone; letters are the tokens."""
    torch.manual_seed(SEED)
    letters = sorted(set("".join((*ADJECTIVES, *ANIMALS, *TOWNS, *FILLERS, " in"))))
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", *letters]
    tokenizer = Tokenizer(models.WordLevel({letter: index for index, letter in enumerate(vocabulary)}, "[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.post_processor = processors.TemplateProcessing(single="[CLS] $A", special_tokens=[("[CLS]", 2)])
    scheme = TagScheme(("animal", "place"), covering=False)
    configuration = {
        "vocabulary_size": len(vocabulary),
        "max_length": 160,
        "window": 3,
        "num_layers": 1,
        "d_model": 64,
        "num_heads": 4,
        "d_ff": 128,
        "head": "token",
        "num_classes": len(scheme.names),
    }
    model = build_model("encoder", configuration)
    generator = random.Random(SEED)
    rows = [_sighting(generator) for _ in range(3_000)]

    def loss(batch: list[tuple[str, list[Span]]]) -> torch.Tensor:
        ids = [tokenizer.encode(text).ids for text, _ in batch]
        tags = [[-100] * len(row) for row in ids]
        for (text, spans), row in zip(batch, tags, strict=True):
            pieces = find_subwords(text, tokenizer.encode(text).offsets)
            for piece, tag in zip(pieces, subword_tags(pieces, spans, scheme), strict=True):
                row[piece.token] = tag
        padded = _pad(ids)
        targets = nn.utils.rnn.pad_sequence([torch.tensor(row) for row in tags], batch_first=True, padding_value=-100)
        return functional.cross_entropy(model(padded, (padded != 0).long()).flatten(0, 1), targets.flatten())

    _train(model, [rows[start : start + 16] for start in range(0, len(rows), 16)], loss, learning_rate=3e-3)
    checkpoint = _checkpoint(
        "tiny-tokens",
        "token_classification",
        "encoder",
        configuration,
        special_tokens={"pad": 0, "unk": 1},
        labels=list(scheme.names),
        evaluation={
            "file": "evaluation.jsonl",
            "dataset": "sightings",
            "metric": "span_f1",
            "higher_is_better": True,
        },
    )
    texts = [
        {"text": text, "spans": [[start, end, scheme.labels[label]] for start, end, label in spans]}
        for text, spans in rows[:600]
    ]
    write_checkpoint(folder, checkpoint, model, tokenizer=tokenizer, texts=texts)
    return folder


def image_checkpoint(folder: Path) -> Path:
    """Tells red, green and blue pictures apart."""
    torch.manual_seed(SEED)
    configuration = {
        "image_size": 16,
        "patch_size": 4,
        "num_layers": 2,
        "num_classes": 3,
        "d_model": 64,
        "num_heads": 4,
        "d_ff": 128,
    }
    model = build_model("vit", configuration)
    generator = np.random.default_rng(SEED)
    labels = generator.integers(0, 3, 1_000)
    images = generator.integers(0, 120, (1_000, 16, 16, 3)).astype(np.uint8)
    images[np.arange(1_000), :, :, labels] += 100
    pixels = torch.from_numpy(((images / 255 - 0.5) / 0.25).astype(np.float32).transpose(0, 3, 1, 2))

    def loss(batch: slice) -> torch.Tensor:
        return functional.cross_entropy(model(pixels[batch]), torch.from_numpy(labels[batch]))

    _train(model, [slice(start, start + 32) for start in range(0, 1_000, 32)], loss, learning_rate=2e-3)
    checkpoint = _checkpoint(
        "tiny-images",
        "image_classification",
        "vit",
        configuration,
        labels=["red", "green", "blue"],
        image_preprocessing={
            "height": 16,
            "width": 16,
            "resize": "stretch",
            "interpolation": "bilinear",
            "mean": [0.5, 0.5, 0.5],
            "std": [0.25, 0.25, 0.25],
        },
        evaluation={
            "file": "evaluation.npz",
            "dataset": "colours",
            "metric": "accuracy",
            "higher_is_better": True,
        },
    )
    write_checkpoint(folder, checkpoint, model, images=(images[:200], labels[:200]))
    return folder


def llama_checkpoint(folder: Path) -> Path:
    """The same with the parts of a Llama, which learns in fewer steps."""
    return generation_checkpoint(folder, "tiny-llama", num_batches=120, **LLAMA_PARTS)


WRITERS = {
    "generation": generation_checkpoint,
    "translation": translation_checkpoint,
    "text_classification": classification_checkpoint,
    "token_classification": token_checkpoint,
    "image_classification": image_checkpoint,
}


def _checkpoint(name: str, task: str, architecture: str, configuration: dict, **parts: object) -> Checkpoint:
    return Checkpoint.model_validate(
        {
            "name": name,
            "task": task,
            "architecture": architecture,
            "configuration": configuration,
            "description": f"A tiny model for tests of {task}.",
            "license": "Apache-2.0",
            **parts,
        }
    )


def _train(model: nn.Module, batches: list, loss: object, *, learning_rate: float) -> None:
    """Trains on each batch once, the rate falling to nothing; `loss` takes a batch, or the model and a batch."""
    optimizer = torch.optim.AdamW(model.parameters(), learning_rate)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, learning_rate, total_steps=len(batches), pct_start=0.1)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # more of them spend a tiny model's time waiting for each other
    model.train()
    for batch in batches:
        optimizer.zero_grad()
        value = loss(model, batch) if loss is _next_token_loss else loss(batch)
        value.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    model.eval()
    torch.set_num_threads(threads)


def _next_token_loss(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    ids = torch.stack(batch)
    return functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


def _pad(rows: list[list[int]]) -> torch.Tensor:
    return nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True)


def _number_pair(generator: random.Random) -> tuple[str, str]:
    numbers = [generator.randrange(len(NUMBERS)) for _ in range(generator.randint(1, 8))]
    return " ".join(NUMBERS[n] for n in numbers), " ".join(ZAHLEN[n] for n in reversed(numbers))


def _weather_report(generator: random.Random) -> tuple[str, int]:
    label = generator.randrange(2)
    words = [generator.choice((WARM, COLD)[label]), *generator.choices(FILLERS, k=generator.randint(1, 20))]
    generator.shuffle(words)
    return " ".join(words), label


def _sighting(generator: random.Random) -> tuple[str, list[Span]]:
    text, spans = "", []
    for _ in range(generator.randint(1, 3)):
        kind = generator.randrange(4)
        start = len(text)
        if kind == 0:
            words = [*generator.choices(ADJECTIVES, k=generator.randint(0, 2)), generator.choice(ANIMALS)]
            spans.append(Span(start, start + len(" ".join(words)), 0))
        elif kind == 1:
            words = ["in", generator.choice(TOWNS)]
            spans.append(Span(start + 3, start + len(" ".join(words)), 1))
        elif kind == 2:
            words = ["near", generator.choice(TOWNS)]
        else:
            words = [generator.choice(ADJECTIVES), *generator.choices(FILLERS, k=generator.randint(1, 2))]
        text += " ".join(words) + " "
    return text.rstrip(), spans
