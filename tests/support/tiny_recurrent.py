"""A tiny recurrent encoder-decoder, trained for seconds to translate numbers word by word and in reverse order."""

import json
import random
from pathlib import Path

import torch
from tiny_models import SEED, _checkpoint, _number_pair, _pad, _train
from tokenizers import Tokenizer
from torch.nn import functional

from headway_training.checkpoint import TEXT_EVALUATION_FILE, load_tokenizer, write_checkpoint
from headway_training.models import build_model


def recurrent_checkpoint(folder: Path, translation: Path) -> Path:
    """Writes a checkpoint with the tokenizer and the evaluation data of the tiny Transformer's, `translation`."""
    torch.manual_seed(SEED)
    tokenizer: Tokenizer = load_tokenizer(translation)
    configuration = {
        "vocabulary_size": tokenizer.get_vocab_size(),
        "max_source_length": 24,
        "max_target_length": 24,
        "d_embedding": 32,
        "d_state": 64,
        "d_attention": 64,
    }
    model = build_model("recurrent", configuration)
    generator = random.Random(SEED)
    pairs = [_number_pair(generator) for _ in range(12_800)]

    def loss(batch: list[tuple[str, str]]) -> torch.Tensor:
        source = _pad([tokenizer.encode(source).ids for source, _ in batch])
        target = _pad([[1, *tokenizer.encode(target).ids] for _, target in batch])
        logits = model(source, (source != 0).long(), target[:, :-1])
        return functional.cross_entropy(logits.flatten(0, 1), target[:, 1:].flatten(), ignore_index=0)

    batches = [pairs[start : start + 64] for start in range(0, len(pairs), 64)]
    _train(model, batches, loss, learning_rate=1e-2)
    checkpoint = _checkpoint(
        "tiny-recurrent",
        "translation",
        "recurrent",
        configuration,
        special_tokens={"pad": 0, "bos": 1, "eos": 2, "unk": 3},
        languages={"source": "en", "target": "de"},
        evaluation={
            "file": TEXT_EVALUATION_FILE,
            "dataset": "numbers",
            "metric": "sacrebleu",
            "higher_is_better": True,
        },
    )
    lines = (translation / TEXT_EVALUATION_FILE).read_text(encoding="utf-8").splitlines()
    write_checkpoint(folder, checkpoint, model, tokenizer=tokenizer, texts=[json.loads(line) for line in lines])
    return folder
