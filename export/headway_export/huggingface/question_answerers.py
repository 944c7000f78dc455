"""Models that find answers in texts, exported as they are: an encoder needs no cache.

B rows, T tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import AutoModelForQuestionAnswering

from headway_export.errors import SourceError
from headway_export.huggingface.encoders import HuggingFaceClassifier, joins_texts, open_encoder
from headway_export.huggingface.folder import ModelFolder
from headway_export.source import ExportSource
from headway_server.bundles import SpecialTokens
from headway_training.folders import padding_of


class HuggingFaceQuestionAnswerer(HuggingFaceClassifier):
    """A model of `transformers` that tells where answers begin and end, in its own arithmetic."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor | None = None) -> Tensor:
        """(B, T), (B, T), (B, T) -> logits of a token being the first of an answer and the last, (B, 2, T)."""
        types = {} if token_type_ids is None else {"token_type_ids": token_type_ids}
        output = self.model(input_ids=input_ids, attention_mask=attention_mask, return_dict=True, **types)
        return torch.stack([output.start_logits, output.end_logits], dim=1)


def read_question_answerer(folder: ModelFolder) -> tuple[ExportSource, tuple[str, ...]]:
    """Reads a model for extractive question answering.

    Raises:
        SourceError: The folder is incomplete, or its model is none that can be served.
    """
    opened = open_encoder(folder, AutoModelForQuestionAnswering, HuggingFaceQuestionAnswerer)
    if not joins_texts(opened.tokenizer):
        raise SourceError(
            f"{folder.path}: its tokenizer puts no token between a question and a context, so that the model cannot "
            "tell them apart; take the tokenizer that the model was trained with"
        )
    source = folder.source(
        opened.model,
        opened.module,
        make_reference=opened.make_reference,
        tokenizer=opened.tokenizer,
        special_tokens=SpecialTokens(pad=padding_of(folder.config, opened.own_tokenizer)),
        text_pairs="required",
        evaluation=folder.evaluation(),
    )
    return source, opened.notes
