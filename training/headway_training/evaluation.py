"""What a model reaches on data: predictions, nats per character of a text, translations, captions, transcripts.

B rows, I image size, L window, N tokens of a text, T tokens of a row, S source tokens, C classes, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 (torch's own convention)

from headway_training.batches import sorted_batches
from headway_training.models import Captioner, RecurrentTranslator, Transcriber, Transformer
from headway_training.models.parts.attention import CachedAttention, cross_attention
from headway_training.models.protocols import RecurrentEncoderDecoder, is_recurrent
from headway_training.models.recurrent import recur_packed
from headway_training.models.writer import Writer

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
) -> list[NDArray[np.float32]]:
    """Runs a classifier of texts or tokens on encoded texts, in batches of similar length.

    Args:
        model: The classifier.
        ids: The tokens of each text.
        padding: The id of padding.
        token_types: Types of the tokens, for models that have them and read pairs; None: all are 0.

    Returns:
        float32 logits of each text: (C,), or (T, C) of a token classifier.
    """
    device = next(model.parameters()).device
    logits: dict[int, NDArray[np.float32]] = {}
    for batch in sorted_batches([len(row) for row in ids], EVALUATION_TOKENS):
        rows = [ids[i] for i in batch]
        inputs = [pad(rows, padding), token_mask(rows)]
        if token_types is not None:
            inputs.append(pad([token_types[i] for i in batch], 0))
        answers = model(*(tensor.to(device) for tensor in inputs)).float().cpu().numpy()  # (B, C) or (B, T, C)
        for i, row, answer in zip(batch.tolist(), rows, answers, strict=True):
            logits[i] = answer if answer.ndim == 1 else answer[: len(row)]
    return [logits[i] for i in range(len(ids))]


@torch.inference_mode()
def image_logits(model: nn.Module, pixel_values: Tensor, *, batch_size: int = 250) -> NDArray[np.float32]:
    """Runs a classifier on images, float (B, 3, H, W): float32 logits (B, C)."""
    device = next(model.parameters()).device
    logits = [model(part.to(device)).float().cpu() for part in torch.split(pixel_values, batch_size)]
    answers: NDArray[np.float32] = torch.cat(logits).numpy()
    return answers


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


_Step = Callable[[Tensor, int], Tensor]
"""Reads the tokens (B, 1) at a position, after all tokens before it -> logits (B, 1, V)."""


@torch.inference_mode()
def translate_greedily(
    model: Transformer | RecurrentTranslator,
    source_ids: Tensor,
    source_mask: Tensor,
    *,
    bos: int,
    eos: int,
    max_length: int | None = None,
) -> list[list[int]]:
    """Translates sentences, always taking the likeliest token, with the key/value cache or the recurrent state.

    Args:
        model: The model.
        source_ids: int64 (B, S).
        source_mask: int64 (B, S), 1 at tokens and 0 at padding.
        bos: The token a target begins with.
        eos: The token it ends with.
        max_length: Most tokens of a translation, `eos` included; None: the model's limit.

    Returns:
        The tokens of every translation, without `bos` and `eos`.
    """
    steps = min(max_length or model.max_target_length, model.max_target_length)
    if is_recurrent(model):
        step = _recurrent_step(cast("RecurrentEncoderDecoder", model), source_ids, source_mask)
    else:
        attending = cast("Transformer", model)
        step = _transformer_step(attending, attending.encode(source_ids, source_mask), source_mask, steps)
    return _take_likeliest(step, source_ids.new_full((len(source_ids), 1), bos), steps, eos)


@torch.inference_mode()
def write_greedily(
    model: Captioner | Transcriber, inputs: Tensor, starts: Sequence[int], eos: int, *, batch_size: int = 250
) -> list[list[int]]:
    """Writes a caption of each image, or what is said in each window of audio, always taking the likeliest token.

    Args:
        model: The model.
        inputs: What it reads: float (B, 3, I, I), normalised, or float (B, mel bins, frames).
        starts: What a text begins with: `bos`, and the token of its language.
        eos: The token it ends with.
        batch_size: Inputs that are read at once.

    Returns:
        The tokens of every text, without `starts` and `eos`.
    """
    device = next(model.parameters()).device
    rows: list[list[int]] = []
    for part in torch.split(inputs, batch_size):
        memory = model.encode(part.to(device))
        step = _transformer_step(model, memory, torch.ones(memory.shape[:2], device=device), model.max_target_length)
        given = torch.tensor([starts], device=device).expand(len(part), -1)  # (B, P)
        rows += _take_likeliest(step, given, model.max_target_length, eos)
    return rows


def _take_likeliest(step: _Step, starts: Tensor, steps: int, eos: int) -> list[list[int]]:
    """Reads the tokens (B, P) that rows start with, and goes on until all have ended or `steps` tokens are read."""
    rows, num_given = starts.shape
    tokens = starts[:, :1]  # (B, 1)
    running = torch.ones(rows, dtype=torch.bool, device=starts.device)  # (B)
    chosen: list[Tensor] = []
    for position in range(steps):
        logits = step(tokens, position)
        if position + 1 < num_given:
            tokens = starts[:, position + 1 : position + 2]
            continue
        tokens = logits.argmax(dim=-1)  # (B, 1)
        chosen.append(tokens)
        running &= tokens[:, 0] != eos
        if not running.any():
            break
    written: list[list[int]] = torch.cat(chosen, dim=1).tolist()
    return [row[: row.index(eos)] if eos in row else row for row in written]


def _transformer_step(model: Writer, memory: Tensor, source_mask: Tensor, steps: int) -> _Step:
    attend_cross = cross_attention(model.cross_keys_values(memory), source_mask, model.kernel)
    cache = CachedAttention(steps, model.kernel)

    def step(tokens: Tensor, position: int) -> Tensor:
        position_ids = torch.full_like(tokens, position)
        return model.logits(model.decode(tokens, position_ids, cache.at(position_ids), attend_cross))

    return step


def _recurrent_step(model: RecurrentEncoderDecoder, source_ids: Tensor, source_mask: Tensor) -> _Step:
    cross, first_states = model.encode_source(source_ids, source_mask, recur_packed)
    states = tuple(one[:, None] for one in first_states)  # (B, 1, H) each

    def step(tokens: Tensor, _position: int) -> Tensor:
        nonlocal states
        logits, states, _ = model.step(tokens, states, cross, source_mask)
        return logits

    return step
