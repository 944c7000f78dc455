"""What a model reaches on data: logits to predictions, text to nats per character, sentences to translations.

B rows, L window, N tokens of a text, T tokens of a row, S source tokens, C classes, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 (torch's own convention)

from headway_training.batches import sorted_batches
from headway_training.decoding import translate_greedily
from headway_training.models import RecurrentTranslator, Transformer

EVALUATION_TOKENS = 8192
"""Bound of longest x count of an evaluation batch."""


def pad(rows: Sequence[Sequence[int]], padding: int) -> Tensor:
    """Pads rows of ids on the right: int64 (B, the longest row)."""
    longest = max(len(row) for row in rows)
    padded = np.full((len(rows), longest), padding, dtype=np.int64)
    for i, row in enumerate(rows):
        padded[i, : len(row)] = row
    return torch.from_numpy(padded)


def token_mask(rows: Sequence[Sequence[int]]) -> Tensor:
    """1 at tokens and 0 at padding: int64 (B, the longest row)."""
    lengths = torch.tensor([len(row) for row in rows])
    return (torch.arange(int(lengths.max()))[None, :] < lengths[:, None]).long()


def evaluation_windows(num_tokens: int, window: int) -> Iterator[tuple[int, int, int]]:
    """The windows in which a text is read (docs/checkpoint.md).

    A window of at most `window` tokens predicts those of its tokens that no earlier window has predicted; the next one
    begins half a window later. The text's first token has nothing before it and is not predicted.

    Yields:
        Start and end of a window, and the first token that it predicts, as positions in the text.
    """
    start, predicted = 0, 1
    while predicted < num_tokens:
        end = min(start + window, num_tokens)
        yield start, end, predicted
        start, predicted = start + window // 2, end


@torch.inference_mode()
def nats_per_character(model: nn.Module, tokenizer: Tokenizer, text: str, *, batch_size: int = 16) -> float:
    """Negative log-likelihood of a text, divided by the number of characters whose tokens were predicted.

    Args:
        model: A decoder: int64 (B, L) -> logits (B, L, V), with `max_length`.
        tokenizer: Its tokenizer.
        text: The text; at least two tokens.
        batch_size: Windows that are read at once.

    Raises:
        ValueError: The text is a single token.
    """
    encoding = tokenizer.encode(text, add_special_tokens=False)
    ids = torch.tensor(encoding.ids)  # (N)
    if len(ids) < 2:
        raise ValueError(f"the text has {len(ids)} tokens; nats per character need at least 2")
    windows = list(evaluation_windows(len(ids), int(model.max_length)))  # type: ignore[arg-type]  # nn.Module's attribute
    total = 0.0
    for first in range(0, len(windows), batch_size):
        total += _window_losses(model, ids, windows[first : first + batch_size])
    num_characters = len(text) - encoding.offsets[0][1]
    return total / num_characters


def _window_losses(model: nn.Module, ids: Tensor, windows: Sequence[tuple[int, int, int]]) -> float:
    """Sum of the negative log-likelihoods of the tokens that `windows` predict."""
    device = next(model.parameters()).device
    rows = [ids[start:end].tolist() for start, end, _ in windows]
    input_ids = pad(rows, 0).to(device)  # (B, L)
    logits = model(input_ids)[:, :-1].float()  # (B, L - 1, V); the last one predicts past the window
    losses = F.cross_entropy(logits.transpose(1, 2), input_ids[:, 1:], reduction="none")  # (B, L - 1)
    positions = torch.arange(1, input_ids.shape[1], device=device)  # (L - 1), of the predicted tokens
    first = torch.tensor([predicted - start for start, _, predicted in windows], device=device)[:, None]
    end = torch.tensor([len(row) for row in rows], device=device)[:, None]
    return float((losses.double() * ((positions >= first) & (positions < end))).sum())


@torch.inference_mode()
def text_logits(
    model: nn.Module,
    ids: Sequence[Sequence[int]],
    padding: int,
    token_types: Sequence[Sequence[int]] | None = None,
) -> NDArray[np.float32]:
    """Runs a classifier on encoded texts, in batches of similar length: a row of float32 logits each, (B, C).

    Args:
        model: The classifier.
        ids: The tokens of each text.
        padding: What stands where a text has no token.
        token_types: Types of the tokens, for models that have them and read pairs; None: all are 0.
    """
    device = next(model.parameters()).device
    logits: dict[int, NDArray[np.float32]] = {}
    for batch in sorted_batches([len(row) for row in ids], EVALUATION_TOKENS):
        rows = [ids[i] for i in batch]
        inputs = [pad(rows, padding), token_mask(rows)]
        if token_types is not None:
            inputs.append(pad([token_types[i] for i in batch], 0))
        answers = model(*(tensor.to(device) for tensor in inputs)).float().cpu().numpy()  # (B, C)
        logits |= zip(batch.tolist(), answers, strict=True)
    return np.stack([logits[i] for i in range(len(ids))])


@torch.inference_mode()
def tag_tokens(model: nn.Module, ids: Sequence[Sequence[int]], padding: int) -> list[NDArray[np.float32]]:
    """Log-probabilities of the tags of every token of encoded texts: a float32 (T, C) for each."""
    device = next(model.parameters()).device
    tagged: list[NDArray[np.float32]] = [np.empty((0, 0), np.float32)] * len(ids)
    for batch in sorted_batches([len(row) for row in ids], EVALUATION_TOKENS):
        rows = [ids[i] for i in batch]
        logits = model(pad(rows, padding).to(device), token_mask(rows).to(device))  # (B, T, C)
        scores = logits.float().log_softmax(dim=-1).cpu().numpy()
        for i, row in zip(batch, scores, strict=True):
            tagged[i] = row[: len(ids[i])]
    return tagged


@torch.inference_mode()
def image_logits(model: nn.Module, pixel_values: Tensor, *, batch_size: int = 250) -> NDArray[np.float32]:
    """Runs a classifier on images, float (B, 3, H, W): a row of float32 logits each, (B, C)."""
    device = next(model.parameters()).device
    logits = [model(part.to(device)).float().cpu() for part in torch.split(pixel_values, batch_size)]
    answers: NDArray[np.float32] = torch.cat(logits).numpy()
    return answers


@torch.inference_mode()
def translate(
    model: Transformer | RecurrentTranslator,
    tokenizer: Tokenizer,
    sources: Sequence[Sequence[int]],
    *,
    pad_id: int,
    bos: int,
    eos: int,
) -> list[str]:
    """Translates encoded sentences greedily; the texts are in the order of the sentences."""
    device = next(model.parameters()).device
    texts = [""] * len(sources)
    for batch in sorted_batches([len(row) for row in sources], EVALUATION_TOKENS):
        rows = [sources[i] for i in batch]
        tokens = translate_greedily(model, pad(rows, pad_id).to(device), token_mask(rows).to(device), bos=bos, eos=eos)
        for i, text in zip(batch, tokenizer.decode_batch(tokens), strict=True):
            texts[i] = text
    return texts
