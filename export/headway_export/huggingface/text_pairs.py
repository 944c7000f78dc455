"""Models that make texts of texts by an encoder and a decoder of two families (`EncoderDecoderModel`: BERT2BERT).

The decoder follows `captioners.py`, whose encoder reads images.

B rows, S source tokens, T target tokens, P asked positions, D width of the decoder, E of the encoder, V vocabulary.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Final, cast

import torch
from torch import Tensor
from transformers import AutoModelForSeq2SeqLM
from transformers.modeling_outputs import BaseModelOutput

from headway_export.errors import SourceError
from headway_export.huggingface.attention import check_logits, running
from headway_export.huggingface.captioners import (
    HuggingFaceWriter,
    OwnCaptioner,
    first_position,
    inject,
    memory_of,
    states_of,
    writer_of,
)
from headway_export.huggingface.encoder_decoders import random_tokens, read_generation_config
from headway_export.huggingface.folder import ModelFolder
from headway_export.reference import translation_logits
from headway_export.source import ExportSource
from headway_training.folders import MAX_LENGTH

PAIRS: Final = ("EncoderDecoderModel",)


class HuggingFaceTextPair(HuggingFaceWriter):
    """A model of `transformers` of two families of texts, as an `EncoderDecoder`."""

    def encode(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """(B, S), (B, S) -> (B, S, D)."""
        return memory_of(self.model, input_ids=input_ids, attention_mask=attention_mask)


class OwnTextPair(OwnCaptioner):
    """The same with its own attention."""

    def encode_source(self, source: Tensor) -> Tensor:
        """(1, S) -> (1, S, E)."""
        return states_of(self.model, input_ids=source, attention_mask=torch.ones_like(source))

    def _logits(self, source: Tensor, target_ids: Tensor, memory: Tensor | None) -> Tensor:
        read: dict[str, Any] = {"input_ids": source, "attention_mask": torch.ones_like(source)}
        if memory is not None:
            read = {"encoder_outputs": BaseModelOutput(last_hidden_state=memory)}
        output = self.model(
            **read, decoder_input_ids=target_ids, use_cache=False, output_attentions=True, return_dict=True
        )
        return cast("Tensor", output.logits)


def read_text_pair(folder: ModelFolder) -> tuple[ExportSource, tuple[str, ...]]:
    """Reads a model of two families that makes texts of texts.

    Raises:
        SourceError: The folder is incomplete, or its model is none that can be served.
    """
    tokenizer, start = folder.tokenizer(), read_generation_config(folder)
    model = folder.load(AutoModelForSeq2SeqLM)
    lengths, notes = [], []
    for what, part in (("source", cast("Any", model).encoder), ("target", writer_of(model))):
        base = cast("Any", part).get_decoder() if what == "target" else part
        most = int(cast("Any", part).config.max_position_embeddings) - first_position(base)
        asked = folder.options.max_length
        if asked is not None and asked > most:
            raise SourceError(f"{folder.path}: --max-length {asked}: a {what} has {most} tokens at most")
        lengths.append(asked or min(most, MAX_LENGTH))
        if lengths[-1] < most and asked is None:
            notes.append(f"a {what} of at most {lengths[-1]} tokens: the model takes {most}; --max-length N changes it")
    source, target = (random_tokens(folder, min(40, length)) for length in lengths)
    owner = f"{folder.path}: {type(model).__name__}"
    with torch.inference_mode():
        ids = torch.from_numpy(source)[None]
        expected = model(input_ids=ids, decoder_input_ids=torch.from_numpy(target)[None], use_cache=False).logits[0]
    with running(owner):
        inject(writer_of(model))
        module = HuggingFaceTextPair(model, max_source_length=lengths[0], max_target_length=lengths[1])
        compute = partial(translation_logits, module, source, target)
        found = compute()
    check_logits(found, expected.float().numpy(), owner, compute)
    return (
        folder.source(
            model,
            module,
            make_reference=lambda: OwnTextPair(folder.load(AutoModelForSeq2SeqLM)),
            tokenizer=tokenizer,
            special_tokens=start.special_tokens,
            prompt_prefix=start.prefix,
            suppressed_tokens=start.suppressed_tokens,
            evaluation=folder.evaluation(),
        ),
        (*start.notes, *notes),
    )
