"""Makes what docs/fine-tuning.md measures on: two tiny model folders with fresh weights, and small sets of examples.

    HEADWAY_DATA_DIR=data python docs/experiments/fine_tuning.py fine-tuning

The folder then holds `llama` and `vit` (model folders of `transformers`), `news.txt` to pre-train the first on,
`topics-*.csv`, `tags-*.conllu` and `chats-*.jsonl` to fine-tune it on, and folders of images: eight classes of CIFAR-10
to pre-train the second on, and few images of the other two to fine-tune it on.
"""

import csv
import gzip
import json
import os
import shutil
import sys
from pathlib import Path

import numpy as np
import torch
import transformers
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from headway_training.data.public import DATASETS
from headway_training.recipes import DataSettings

SPECIAL = ["<pad>", "<unk>", "<s>", "</s>", "<|user|>", "<|assistant|>"]
LENGTH = 128
CHAT = (
    "{% for message in messages %}{{ '<|' + message.role + '|>' + message.content + '</s>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
NUM_LABELED, NUM_VALID = 2_000, 500
NUM_SENTENCES = 1_000
HELD_OUT_CLASSES = ("cat", "dog")
NUM_IMAGES = 500


def write_llama(folder: Path, texts: list[str]) -> None:
    """A Llama of three layers, and a tokenizer of 4,000 subwords."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=4_000, special_tokens=SPECIAL, initial_alphabet=alphabet)
    )
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 2)])
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        **dict(zip(("pad_token", "unk_token", "bos_token", "eos_token"), SPECIAL[:4], strict=True)),
        extra_special_tokens=["<|user|>", "<|assistant|>"],
    )
    fast.chat_template = CHAT
    fast.save_pretrained(folder)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=4_000,
        hidden_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=384,
        max_position_embeddings=LENGTH,
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=2,
        eos_token_id=3,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)


def write_vit(folder: Path) -> None:
    """A ViT of three layers that reads 32 x 32 pixels."""
    torch.manual_seed(0)
    config = transformers.ViTConfig(
        hidden_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=192,
        image_size=32,
        patch_size=4,
        hidden_dropout_prob=0.0,
        num_labels=8,
    )
    transformers.ViTForImageClassification(config).save_pretrained(folder)
    mean, std = [0.4914, 0.4822, 0.4465], [0.2470, 0.2435, 0.2616]
    size = {"height": 32, "width": 32}
    transformers.ViTImageProcessor(size=size, image_mean=mean, image_std=std, resample=3).save_pretrained(folder)


def read_news(file: Path) -> list[tuple[str, str]]:
    """Texts with their topics."""
    topics = ("World", "Sports", "Business", "Sci/Tech")
    with gzip.open(file, "rt", encoding="utf-8", newline="") as lines:
        rows = [(topics[int(row[0]) - 1], f"{row[1]} {row[2]}") for row in csv.reader(lines)]
    return [(topic, " ".join(text.replace("\\", " ").split())) for topic, text in rows]


def write_topics(folder: Path, parts: dict[str, list[tuple[str, str]]]) -> None:
    """Topics of news, with labels and as conversations."""
    for name, rows in parts.items():
        with (folder / f"topics-{name}.csv").open("w", encoding="utf-8", newline="") as out:
            csv.writer(out).writerows([("label", "text"), *rows])
        with (folder / f"chats-{name}.jsonl").open("w", encoding="utf-8") as out:
            for topic, text in rows[: 1_000 if name == "test" else None]:
                turns = [
                    ("user", f"Which topic is this about? {text[:240]}"),
                    ("assistant", f"{topic}."),
                    ("user", "Say it in a sentence."),
                    ("assistant", f"It is about {topic.lower()}."),
                ]
                messages = [{"role": role, "content": content} for role, content in turns]
                out.write(json.dumps({"messages": messages}) + "\n")


def write_tags(folder: Path, data: Path) -> None:
    """The first sentences of the treebank, and its development part as test part."""
    train = (data / "en_ewt-ud-train.conllu.gz", data / "en_ewt-ud-dev.conllu.gz")
    contents = (gzip.decompress(file.read_bytes()).decode() for file in train)
    sentences, test = (content.strip().split("\n\n") for content in contents)
    kept = np.random.default_rng(0).permutation(len(sentences))
    picked = [sentences[i] for i in kept[: NUM_SENTENCES + NUM_VALID]]
    parts = {"train": picked[:NUM_SENTENCES], "valid": picked[NUM_SENTENCES:], "test": test}
    for name, rows in parts.items():
        (folder / f"tags-{name}.conllu").write_text("\n\n".join(rows) + "\n\n", encoding="utf-8")


def write_images(folder: Path, data: Path) -> None:
    """Eight classes, and few images of two more."""
    dataset = DATASETS["cifar10"]
    splits = dataset.read(dataset, data, DataSettings(dataset="cifar10", valid_fraction=0.04))
    for name, part, most in (
        ("train", splits.train, NUM_IMAGES),
        ("valid", splits.valid, 200),
        ("test", splits.test, 10_000),
    ):
        counts = dict.fromkeys(splits.labels, 0)
        for pixels, index in zip(part.images, part.labels, strict=True):
            label = splits.labels[index]
            held_out = label in HELD_OUT_CLASSES
            if counts[label] < (most if held_out else 2_500):
                target = folder / ("pets" if held_out else "things") / name / label
                target.mkdir(parents=True, exist_ok=True)
                Image.fromarray(pixels).save(target / f"{counts[label]:05d}.png")
                counts[label] += 1


def main() -> None:
    """Writes everything into the folder that is named."""
    folder, data = Path(sys.argv[1]), Path(os.environ.get("HEADWAY_DATA_DIR", "data"))
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    news = read_news(data / "ag_news" / "train_subset.csv.gz")
    (folder / "news.txt").write_text("\n".join(text for _, text in news[:-NUM_VALID]) + "\n", encoding="utf-8")
    (folder / "news-valid.txt").write_text("\n".join(text for _, text in news[-NUM_VALID:]) + "\n", encoding="utf-8")
    order = np.random.default_rng(0).permutation(len(news) - NUM_VALID)
    labeled = [news[i] for i in order[:NUM_LABELED]]
    test = read_news(data / "ag_news" / "test_rows_0001-3800.csv.gz")
    write_topics(folder, {"train": labeled, "valid": news[-NUM_VALID:], "test": test})
    write_tags(folder, data / "ud_english_ewt")
    write_images(folder, data)
    write_llama(folder / "llama", [text for _, text in news])
    write_vit(folder / "vit")


main()
