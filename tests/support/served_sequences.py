"""Exports folders of encoder-decoders by the command, and asks `transformers` what they write."""

import warnings
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
import transformers
from typer.testing import CliRunner

from headway_export.cli import app

TEXTS = [
    "the old fire",
    "rain",
    "an answer is not in the rain, the big house",
    "der Mann, über die école été!",
    "a red bicycle and the dog's small 你好 house in the rain " * 2,
]
"""Of several lengths, neighbours in a batch."""


class Generated(NamedTuple):
    """What `generate` gives."""

    texts: list[str]
    source_length: int


def export(folders: dict[str, Path], store: Path, *flags: str) -> Path:
    """Exports model folders by name into a store, and returns it."""
    for name, folder in folders.items():
        result = CliRunner().invoke(app, ["hf", str(folder), "--store", str(store), "--name", name, *flags])
        assert result.exit_code == 0, f"{name}: {result.output}"
    return store


@cache
def _load(folder: Path):
    """Returns a folder's model and tokenizer as `transformers` reads them."""
    model = transformers.AutoModelForSeq2SeqLM.from_pretrained(folder, attn_implementation="eager").eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # Marian's recommends a library that it does not use here
        return model, transformers.AutoTokenizer.from_pretrained(folder)


def shown(text: str) -> str:
    """Returns a text without what the two sides may show differently: space at its ends, and half a character."""
    return text.rstrip("\ufffd").strip()


def generate(
    folder: Path,
    text: str,
    new_tokens: int,
    *,
    languages: tuple[str, str] | None = None,
    most: int | None = None,
    **options,
):
    """Returns what `generate` writes.

    Args:
        folder: The model's.
        text: The source.
        new_tokens: Most tokens that the model chooses; those that it is forced to begin with are not among them.
        languages: Source and target, as the folder's tokenizer names them.
        most: Most texts.
        options: Of `generate`.
    """
    model, tokenizer = _load(folder)
    if languages is not None:
        tokenizer.src_lang = languages[0]
        target = languages[1] if languages[1] in tokenizer.get_vocab() else f"__{languages[1]}__"
        options["forced_bos_token_id"] = tokenizer.convert_tokens_to_ids(target)
    encoded = tokenizer(text, return_tensors="pt")
    if model.config.model_type == "led":  # as its documentation advises
        encoded["global_attention_mask"] = (torch.arange(encoded.input_ids.shape[1]) == 0).long()[None]
    forced = options.get("forced_bos_token_id", model.generation_config.forced_bos_token_id)
    settings = {
        "max_new_tokens": new_tokens + (forced is not None),
        "forced_eos_token_id": None,
        "num_beams": 1,
        "min_length": 0,
        "no_repeat_ngram_size": 0,
        **options,
    }
    ids = model.generate(**encoded, do_sample=False, **settings)
    # Of texts that are the same the best alone is told.
    texts = [shown(text) for text in dict.fromkeys(tokenizer.batch_decode(ids, skip_special_tokens=True))]
    return Generated(texts[:most], encoded.input_ids.shape[1])


def find_best(folder: Path, text: str, new_tokens: int, count: int, **options):
    """Returns the best texts of `generate` with four beams, so many as there are, but no more than `count`."""
    return generate(folder, text, new_tokens, num_beams=4, num_return_sequences=4, most=count, **options).texts
