"""Tiny models of documents with random weights, as the folders that `save_pretrained` writes, and pages for them."""

from pathlib import Path
from random import Random
from typing import Any

import torch
import transformers

LENGTH = 32
LABELS = ("O", "B-name", "I-name", "B-sum", "I-sum")
_PIECES = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdef", "##a", "##b", "##c", "##d", "##ef", "ab", "##cd")
_LETTERS = ("<s>", "<pad>", "</s>", "<unk>", "<mask>", *"abcdef", "Ġ", "Ġa", "Ġb", "Ġab", "cd", "ef")
_MERGES = ("Ġ a", "Ġ b", "Ġa b", "c d", "e f")
_SIZES = {
    "hidden_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": LENGTH,
    "num_labels": len(LABELS),
    "id2label": dict(enumerate(LABELS)),
    "label2id": {label: number for number, label in enumerate(LABELS)},
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "layoutlm": ("LayoutLM", {**_SIZES, "vocab_size": len(_PIECES)}),
    "lilt": (
        "Lilt",
        {**_SIZES, "vocab_size": len(_LETTERS), "pad_token_id": 1, "max_position_embeddings": LENGTH + 2},
    ),
    "bros": ("Bros", {**_SIZES, "hidden_size": 128, "vocab_size": len(_PIECES)}),
}
"""Prefix of the classes of a family and its configuration, by model type."""


def own_tokenizer(family: str, **changes: Any) -> Any:
    """Makes the tokenizer that folders of a family have: BERT's, or of LiLT that of LayoutLMv3."""
    if family == "lilt":
        vocabulary = {piece: number for number, piece in enumerate(_LETTERS)}
        merges = [tuple(merge.split()) for merge in _MERGES]
        kind = changes.pop("kind", transformers.LayoutLMv3Tokenizer)
        return kind(vocab=vocabulary, merges=merges, **changes)
    vocabulary = {piece: number for number, piece in enumerate(_PIECES)}
    return transformers.BertTokenizer(vocab=vocabulary, **changes)


def write_model(folder: Path, family: str, **changes: Any) -> Path:
    """Writes a folder of a family, with weights that make answers vary."""
    prefix, values = FAMILIES[family]
    config = getattr(transformers, f"{prefix}Config")(**{**values, **changes})
    torch.manual_seed(3)
    model = getattr(transformers, f"{prefix}ForTokenClassification")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.3)
    model.save_pretrained(folder)
    own_tokenizer(family).save_pretrained(folder)
    return folder


def draw_page(draw: Random, num_words: int, *, width: float = 612, height: float = 792) -> dict[str, Any]:
    """Draws the words of a page, four sides of a box for each, and its size."""
    words = ["".join(draw.choices("abcdef", k=draw.randint(1, 4))) for _ in range(num_words)]
    sides = [[sorted(round(draw.uniform(0, side), 2) for _ in "ab") for side in (width, height)] for _ in words]
    boxes = [(left, top, right, bottom) for (left, right), (top, bottom) in sides]
    return {"words": words, "boxes": boxes, "width": width, "height": height}
