"""Makes what docs/fine-tuning.md measures on: a tiny model folder with fresh weights, and small sets of examples.

    HEADWAY_DATA_DIR=data python docs/journal/fine-tuning/data.py fine-tuning

The folder then holds `llama`, a model folder of `transformers`, `news.txt` to pre-train it on, and `topics-*.csv` and
`chats-*.jsonl` to fine-tune it on.
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
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

SPECIAL = ["<pad>", "<unk>", "<s>", "</s>", "<|user|>", "<|assistant|>"]
LENGTH = 128
CHAT = (
    "{% for message in messages %}{{ '<|' + message.role + '|>' + message.content + '</s>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
NUM_LABELED, NUM_VALID = 2_000, 500


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
    write_llama(folder / "llama", [text for _, text in news])


main()
