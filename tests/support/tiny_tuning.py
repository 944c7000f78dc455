"""Tiny model folders of Hugging Face `transformers` and data to fine-tune them on."""

import json
import random
from pathlib import Path

import tiny_huggingface as tiny
import tiny_vision
from rich.console import Console

from headway_training.data import OwnData
from headway_training.run import RunOptions, run_training

CHAT = (
    "{% for m in messages %}{{ '<s>' if m.role == 'user' else '<unk>' }}{{ m.content + '</s>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<unk>' }}{% endif %}"
)
"""A template that does not mark what the assistant writes."""
MARKED_CHAT = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{{ '<unk>' }}"
    "{% generation %}{{ m.content + '</s>' }}{% endgeneration %}"
    "{% else %}{{ '<s>' + m.content + '</s>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<unk>' }}{% endif %}"
)
"""The same with marks."""
COMMON = (
    "tracker=none",
    "optimization.epochs=100",
    "optimization.evaluations=2",
    "optimization.state_every_steps=4",
    "optimization.learning_rate=1e-2",
    "optimization.average_decay=0",
)
TOKENS, ROWS = "optimization.batch_tokens=256", "optimization.batch_size=8"
RECIPES = {
    "topics": ("ag-news", (*COMMON, TOKENS, "model.max_length=40")),
    "tags": ("ud-ewt-pos", (*COMMON, TOKENS, "model.max_length=40", "augmentation.subword_splitting=0")),
    "pictures": (
        "cifar10",
        (
            *COMMON,
            ROWS,
            "preprocessing.mean=[0.5, 0.5, 0.5]",
            "preprocessing.std=[0.5, 0.5, 0.5]",
            *("preprocessing.interpolation=bilinear",),
        ),
    ),
    "story": ("tiny-shakespeare", (*COMMON, ROWS, "model.max_length=24", "optimization.optimizer=adamw")),
    "chats": (
        "tiny-shakespeare",
        (
            *COMMON,
            TOKENS,
            *("model.max_length=48", "optimization.optimizer=adamw"),
            *("optimization.batch_size=", "augmentation.subword_splitting="),
        ),
    ),
}
"""Recipe and settings of each task, by the name of its run."""
FOLDERS = {"topics": "bert", "tags": "bert", "pictures": "vit", "story": "gpt2", "chats": "llama"}
"""The folder that each starts from."""


def write_folders(root: Path) -> None:
    """Writes a folder of each family."""
    for family in ("bert", "gpt2", "llama"):
        tiny.write_model(root / family, family, "ForSequenceClassification" if family == "bert" else "")
        tiny.write_tokenizer(
            root / family,
            has_types=family == "bert",
            frame="<s> $A </s>" if family == "bert" else "$A",
            chat_template=CHAT if family == "llama" else None,
        )
    tiny_vision.write_vision_model(root / "vit", "vit")


def write_data(root: Path) -> dict[str, Path]:
    """Writes data for each task that a word or a colour gives away."""
    import numpy as np
    from PIL import Image

    generator = random.Random(0)
    words = ["the", "old", "fire", "rain", "is", "so"]
    rows = [(generator.sample(words, 4), i % 2 == 0) for i in range(48)]
    texts = [(" ".join([*row, "good" if good else "bad"]), good) for row, good in rows]
    lines = [f"{'praise' if good else 'blame'},{text}" for text, good in texts]
    (root / "topics.csv").write_text("\n".join(["label,text", *lines]), encoding="utf-8")
    tagged = ["\n".join(f"{word}\t{'B-name' if word in ('fire', 'rain') else 'O'}" for word in row) for row, _ in rows]
    (root / "tags.conll").write_text("\n\n".join(tagged) + "\n", encoding="utf-8")
    (root / "story.txt").write_text("\n".join(text for text, _ in texts), encoding="utf-8")
    with (root / "chats.jsonl").open("w", encoding="utf-8") as out:
        for text, good in texts:
            turns = [
                ("user", text),
                ("assistant", "it is good" if good else "it is bad"),
                ("user", "so"),
                ("assistant", "no"),
            ]
            messages = [{"role": role, "content": content} for role, content in turns]
            out.write(json.dumps({"messages": messages}) + "\n")
    pixels = np.random.default_rng(0)
    for label, colour in (("red", (200, 40, 40)), ("blue", (40, 40, 200))):
        (root / "pictures" / label).mkdir(parents=True)
        for i in range(10):
            noisy = np.clip(np.array(colour) + pixels.normal(0, 20, (32, 32, 3)), 0, 255).astype(np.uint8)
            Image.fromarray(noisy).save(root / "pictures" / label / f"{i}.png")
    files = {
        "topics": "topics.csv",
        "tags": "tags.conll",
        "pictures": "pictures",
        "story": "story.txt",
        "chats": "chats.jsonl",
    }
    return {name: root / file for name, file in files.items()}


def tune(
    root: Path,
    data: dict[str, Path],
    name: str,
    *settings: str,
    to: str | None = None,
    steps: int = 12,
    resume: bool = False,
) -> Path:
    """Fine-tunes the folder of a task; returns that of the checkpoint."""
    recipe, own = RECIPES[name]
    options = RunOptions(
        recipe=recipe,
        settings=(*own, f"name={name}", *settings),
        own_data=OwnData(train=str(data[name]), valid=str(data[name])),
        output=root / (to or f"run-{name}"),
        init=root / FOLDERS[name],
        max_steps=steps,
        resume=resume,
    )
    return run_training(options, Console(quiet=True))
