"""A tiny decoder that can be talked to: untrained, so it says nothing of sense, but all of its bundle is real."""

from pathlib import Path

import torch
from tiny_chat import BOS_ID, EOS_ID, NAMESPACE, byte_level_tokenizer

from headway_export.exporter import ExportOptions, export
from headway_export.source import from_checkpoint
from headway_server.bundles import Bundle, Precision
from headway_training.checkpoint import Checkpoint, write_checkpoint
from headway_training.models import build_model

MAX_LENGTH = 256
SEED = 11


def chat_checkpoint(folder: Path, template: str | None = NAMESPACE) -> Path:
    """Writes the checkpoint, with `template` in a file of its own."""
    torch.manual_seed(SEED)
    tokenizer = byte_level_tokenizer()
    configuration = {
        "vocabulary_size": tokenizer.get_vocab_size(),
        "max_length": MAX_LENGTH,
        "num_layers": 1,
        "d_model": 32,
        "num_heads": 2,
        "d_ff": 64,
    }
    checkpoint = Checkpoint.model_validate(
        {
            "name": "tiny-chat",
            "task": "generation",
            "architecture": "gpt",
            "configuration": configuration,
            "description": "A tiny model for tests of conversations.",
            "license": "Apache-2.0",
            "special_tokens": {"bos": BOS_ID, "eos": EOS_ID},
        }
    )
    write_checkpoint(folder, checkpoint, build_model("gpt", configuration), tokenizer=tokenizer)
    if template is not None:
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    return folder


def write_chat_bundle(store: Path, checkpoint: Path) -> Bundle:
    """Exports the checkpoint in fp32."""
    return export(from_checkpoint(checkpoint), ExportOptions(store=store, precisions=(Precision.FP32,)))
