"""Masked language models, whose head reads the states of masks alone: logits of a vocabulary take much memory.

B rows, T tokens, M masks of a row, D model width, V vocabulary.
"""

from __future__ import annotations

from typing import Any, cast

from torch import Tensor, nn
from transformers import AutoModelForMaskedLM

from headway_export.errors import SourceError
from headway_export.huggingface.encoders import HuggingFaceClassifier, open_encoder
from headway_export.huggingface.folder import ModelFolder
from headway_export.source import ExportSource
from headway_server.bundles import SpecialTokens
from headway_training.folders import padding_of


class _WholeMaskFiller(HuggingFaceClassifier):
    """A masked language model of `transformers` as it is; it computes the logits of all tokens."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor, mask_positions: Tensor | None = None) -> Tensor:
        """(B, T), (B, T), (B, M) -> logits of the tokens at these positions, by default the first, (B, M, V)."""
        output = self.model(input_ids=input_ids, attention_mask=attention_mask, return_dict=True)
        return _at(output.logits, mask_positions)


class HuggingFaceMaskFiller(HuggingFaceClassifier):
    """A masked language model of `transformers`, with only the states of masks between encoder and head."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor, mask_positions: Tensor | None = None) -> Tensor:
        """(B, T), (B, T), (B, M) -> logits of the tokens at these positions, by default the first, (B, M, V)."""

        def take(_encoder: nn.Module, _inputs: object, output: Any) -> Any:
            output.last_hidden_state = _at(output.last_hidden_state, mask_positions)
            return output

        encoder = cast("nn.Module", cast("Any", self.model).base_model)
        taking = encoder.register_forward_hook(take)
        try:
            output = self.model(input_ids=input_ids, attention_mask=attention_mask, return_dict=True)
        finally:
            taking.remove()
        return cast("Tensor", output.logits)


def _at(rows: Tensor, positions: Tensor | None) -> Tensor:
    """(B, T, D), (B, M) -> (B, M, D)."""
    if positions is None:
        return rows[:, :1]
    return rows.gather(1, positions.unsqueeze(-1).expand(-1, -1, rows.shape[-1]))


def read_mask_filler(folder: ModelFolder) -> tuple[ExportSource, tuple[str, ...]]:
    """Reads a masked language model.

    Raises:
        SourceError: The folder is incomplete, or its model is none that can be served.
    """
    if folder.own_tokenizer().mask_token_id is None:
        raise SourceError(f"{folder.path}: its tokenizer has no mask token; {folder.task} needs one")
    opened = open_encoder(folder, AutoModelForMaskedLM, HuggingFaceMaskFiller, _WholeMaskFiller)
    own = opened.own_tokenizer
    source = folder.source(
        opened.model,
        opened.module,
        make_reference=opened.make_reference,
        tokenizer=opened.tokenizer,
        special_tokens=SpecialTokens(
            pad=padding_of(folder.config, own), unk=own.unk_token_id, mask=int(own.mask_token_id)
        ),
    )
    note = (
        f"exported to fill masks ({folder.task}); with --pooling the encoder is exported for embeddings, and with "
        "--pooling splade for sparse ones"
    )
    return source, (*opened.notes, note)
