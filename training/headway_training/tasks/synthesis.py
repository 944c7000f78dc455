"""Speaking: the codes of what is said, from a text and from codes of the same voice (models/synthesis.py).

B rows, T tokens, F frames, K books, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 (torch's own convention)

from headway_training.batches import Batch, even_batches, sorted_batches
from headway_training.checkpoint import load_model, read_checkpoint
from headway_training.data.audio import resample, to_float
from headway_training.data.examples import Splits
from headway_training.data.speech import Recordings
from headway_training.errors import DataError, RecipeError
from headway_training.kinds import ROWS, SMOOTHING, augmentation, register
from headway_training.models import Codec, Model, SpeechSynthesizer
from headway_training.recipes import Recipe
from headway_training.tasks.base import (
    IGNORED,
    EvaluationData,
    Metrics,
    Part,
    RecordingsTask,
    SpecialIds,
    TextTask,
    TrainingBatch,
)
from headway_training.tasks.codec import padded
from headway_training.tokenizers import SPEECH, encode_texts

HISTORY_DROPOUT = 0.1
"""Share of the examples that bring no voice, so that a model speaks where none is asked for."""
MEASURED_RECORDINGS = 200
"""Recordings that a validation and a checkpoint take of a part."""
_EVALUATION_TOKENS = 16_384
_MOST_SPEED_CHANGE = 0.15
"""Share by which the other speeds of a recording differ from its own at most."""
_CHANGED_SHARE = 0.5
"""Of the examples, those at another speed, where a recipe has other speeds."""


@register
class SpeechSynthesisTask(RecordingsTask, TextTask):
    """Recordings of one speaker joined at random, each code predicted from voice, text and the codes before it."""

    name = "speech_synthesis"
    unit = "tokens"
    metric = "nats_per_code"
    higher_is_better = False
    settings = (
        *(ROWS, SMOOTHING, "tokenizer", "sampling", "speech.first_book_weight"),
        *augmentation("join_texts", "other_speeds"),
    )
    starts_from = "writes codes of a codec: train one first (task audio_coding)"
    described = ("special_tokens",)
    sentence = "Speaks"
    frame = f"<bos> $A {SPEECH}"
    has_own_tokens = True
    in_order = "input_ids"

    @classmethod
    def training_texts(cls, train: Recordings) -> list[str]:
        """The transcripts."""
        return train.texts

    @classmethod
    def marks(cls, recipe: Recipe, train: Recordings) -> list[str]:
        """What comes between text and codes."""
        return [SPEECH]

    @classmethod
    def sampling_rate(cls, recipe: Recipe) -> int | None:
        """That of the codec which the run starts from; None: it is none, for which the run is refused."""
        assert recipe.init.checkpoint is not None, "the recipe was checked"
        rate = read_checkpoint(recipe.init.checkpoint).configuration.get("sampling_rate")
        return rate if isinstance(rate, int) else None

    def __init__(self, recipe: Recipe, splits: Splits[Any], tokenizer: Tokenizer) -> None:
        assert recipe.init.checkpoint is not None, "the recipe was checked"
        codec, described = load_model(recipe.init.checkpoint)
        if not isinstance(codec, Codec):
            raise RecipeError(
                f"init.checkpoint holds a model of {described.task}; speech_synthesis needs the checkpoint of a codec, "
                "or of a model that speaks"
            )
        super().__init__(recipe, splits)
        self.tokenizer = tokenizer
        self._codec = codec.configuration.codec()
        if self._codec.sampling_rate != splits.train.sampling_rate:
            raise DataError(
                f"the recordings have {splits.train.sampling_rate} samples a second, and the codec is for "
                f"{self._codec.sampling_rate}; resample them"
            )
        self._special = SpecialIds(tokenizer)
        self._text_size = tokenizer.get_vocab_size()
        self._max_length = int(recipe.model["max_length"])
        self._history = int(recipe.model.get("history_frames", 50)) * self._codec.num_books
        self._max_text = int(recipe.model.get("max_text_length", 200))
        weight = recipe.speech.first_book_weight
        if weight != 1 and weight >= self._codec.num_books:
            raise RecipeError(
                f"speech.first_book_weight must be below the number of books ({self._codec.num_books}), and is {weight}"
            )
        self._weights = _weights_of_books(weight, self._codec.num_books)
        encoded = {
            id(part): _Spoken(part, codec, tokenizer, self._text_size)
            for part in (splits.train, splits.valid, splits.test)
        }
        self._train, self._valid, self._test = (encoded[id(part)] for part in (splits.train, splits.valid, splits.test))
        self._changed = [
            _Spoken(splits.train, codec, tokenizer, self._text_size, speed)
            for speed in _other_speeds(recipe.augmentation.other_speeds)
        ]
        fits = [i for i in range(len(self._train)) if self._fits(self._train, [i])]
        self._examples = np.array(fits, np.int64)
        if not fits:
            raise DataError(
                f"no recording fits into model.max_length, {self._max_length}, after a voice of {self._history} tokens"
            )
        if left := len(self._train) - len(fits):
            self.notes = (f"{left} recordings are too long to be learned from; their voices are.",)
        self._speakers = tuple(sorted(set(self._train.speakers)))
        self._of_speaker = {
            one: [i for i, speaker in enumerate(self._train.speakers) if speaker == one] for one in self._speakers
        }

    @property
    def num_train_examples(self) -> int:
        """Recordings."""
        return len(self._examples)

    def model_fields(self) -> dict[str, Any]:
        """The codec's shape, the text's vocabulary and the voices."""
        return {
            **self._codec.to_dict(),
            "vocabulary_size": self._text_size,
            "num_voices": len(self._speakers),
        }

    def checkpoint_fields(self) -> dict[str, Any]:
        """Special tokens, voices, and defaults of sampling."""
        return {
            "special_tokens": self._special.tokens,
            "labels": self._speakers,
            "sampling_defaults": self._recipe.sampling,
        }

    def wrap(self, model: Model) -> Model:
        """The model, of which the language model alone is trained."""
        assert isinstance(model, SpeechSynthesizer)
        for part in (model.encoder, model.quantizer, model.decoder):
            part.requires_grad_(requires_grad=False)
        return model

    def epoch_batches(self, seed: int, epoch: int) -> list[Batch]:
        """Batches of recordings of similar length, in random order."""
        size = self._recipe.optimization.batch_size
        lengths = [len(self._train.codes[i]) for i in self._examples]
        return [self._examples[batch] for batch in even_batches(len(lengths), size, lengths, seed=seed, epoch=epoch)]

    def collate(self, batch: Batch, generator: torch.Generator) -> TrainingBatch:
        """Inputs and targets (B, T): targets are the codes of what is said, and the end."""
        random = np.random.default_rng(int(torch.randint(2**62, (), generator=generator)))
        rows = []
        num_joined = int(random.integers(self._recipe.augmentation.join_texts))  # of all rows, so that little is padded
        for number in batch.tolist():
            others = self._of_speaker[self._train.speakers[number]]
            spoken = self._train
            if self._changed and random.random() < _CHANGED_SHARE:
                changed = self._changed[random.integers(len(self._changed))]
                spoken = changed if self._fits(changed, [number]) else spoken
            joined = [number]
            for _ in range(num_joined):
                if not self._fits(spoken, [*joined, more := int(random.choice(others))]):
                    break
                joined.append(more)
            history = np.empty(0, np.int64)
            if random.random() >= HISTORY_DROPOUT:
                history = self._voice(spoken, random.permutation(others).tolist())
            rows.append(self._sequence(spoken, joined, history))
        tensors = self._tensors(rows)
        return TrainingBatch(tensors=tensors, num_units=sum(len(ids) for ids, _ in rows))

    def loss(self, model: nn.Module, tensors: Mapping[str, Tensor], label_smoothing: float = 0.0) -> Tensor:
        """As `Task.loss`; logits are computed of the tokens that are followed by a target."""
        assert isinstance(model, SpeechSynthesizer)
        targets = tensors["targets"]  # (B, T)
        # While a run is sized up there are no values to tell where nothing is said.
        said = slice(None) if targets.is_meta else targets != IGNORED
        wanted = targets[said].flatten()  # (N)
        logits = model.predict(tensors["input_ids"], said).flatten(0, -2).float()
        losses = F.cross_entropy(logits, wanted, label_smoothing=label_smoothing, reduction="none")
        books = (wanted - self._text_size).div(self._codec.codebook_size, rounding_mode="floor")
        return (losses * self._weights.to(losses.device)[books.clamp(min=0)]).sum()  # the end is in the first's place

    def logits(self, model: nn.Module, tensors: Mapping[str, Tensor]) -> Tensor:
        """(B, T, V)."""
        assert isinstance(model, SpeechSynthesizer)
        return model.predict(tensors["input_ids"])

    @torch.inference_mode()
    def evaluate(self, model: nn.Module, part: Part) -> Metrics:
        """Nats a code, in the voices that the model can be asked for."""
        rows = self._measured(part)
        device = next(model.parameters()).device
        nats, count = 0.0, 0
        for batch in sorted_batches([len(ids) for ids, _ in rows], _EVALUATION_TOKENS):
            tensors = {name: one.to(device) for name, one in self._tensors([rows[i] for i in batch]).items()}
            logits = self.logits(model, tensors).float()
            targets = tensors["targets"].flatten()
            nats += float(F.cross_entropy(logits.flatten(0, 1), targets, ignore_index=IGNORED, reduction="sum"))
            count += int((targets != IGNORED).sum())
        return {"nats_per_code": nats / count}

    def measure_baseline(self) -> None:
        """None: no simple method speaks."""

    def calibrate(self, model: nn.Module) -> None:
        """Gives the model the codes of its voices."""
        assert isinstance(model, SpeechSynthesizer)
        for number, speaker in enumerate(self._speakers):
            tokens = self._voice(self._train, self._of_speaker[speaker])
            codes = (tokens - self._text_size) % self._codec.codebook_size
            model.voices[number] = torch.from_numpy(codes.reshape(-1, self._codec.num_books))

    def evaluation_data(self) -> EvaluationData:
        """Tokens of test sequences one after another, their lengths, and how many of each come before the speech."""
        rows = self._measured("test")
        return EvaluationData(
            arrays={
                "input_ids": np.concatenate([ids for ids, _ in rows]),
                "lengths": np.array([len(ids) for ids, _ in rows]),
                "prompt_lengths": np.array([first for _, first in rows]),
            }
        )

    def _measured(self, part: Part) -> list[tuple[NDArray[np.int64], int]]:
        """Sequences of the part's first recordings that fit, each in the voice of its speaker if that is known."""
        spoken = self._valid if part == "valid" else self._test
        rows: list[tuple[NDArray[np.int64], int]] = []
        for number in range(len(spoken)):
            others = self._of_speaker.get(spoken.speakers[number], [])
            ids, first = self._sequence(
                spoken, [number], self._voice(self._train, others) if others else np.empty(0, np.int64)
            )
            if len(ids) <= self._max_length:
                rows.append((ids, first))
            if len(rows) == MEASURED_RECORDINGS:
                break
        return rows

    def _fits(self, spoken: _Spoken, numbers: Sequence[int]) -> bool:
        """True if these recordings, joined, can follow a voice."""
        text = 2 + sum(len(spoken.texts[i]) + 1 for i in numbers)
        codes = 1 + sum(len(spoken.codes[i]) for i in numbers)
        return text <= self._max_text and self._history + text + codes <= self._max_length

    def _voice(self, spoken: _Spoken, numbers: Sequence[int]) -> NDArray[np.int64]:
        """The codes of recordings one after another, as many as a voice has; if they are too few, again."""
        parts: list[NDArray[np.int64]] = []
        length = 0
        for number in numbers:
            parts.append(spoken.codes[number])
            length += len(parts[-1])
            if length >= self._history:
                break
        return np.resize(np.concatenate(parts), self._history)

    def _sequence(
        self, spoken: _Spoken, numbers: Sequence[int], history: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], int]:
        """The tokens of recordings joined, and how many of them come before the speech."""
        (text,) = encode_texts(self.tokenizer, [" ".join(spoken.transcripts[i] for i in numbers)], None)
        codes = [spoken.codes[i] for i in numbers]
        prompt = [history, np.array(text, np.int64)]
        return np.concatenate([*prompt, *codes, [self._special.eos]]), sum(map(len, prompt))

    def _tensors(self, rows: Sequence[tuple[NDArray[np.int64], int]]) -> dict[str, Tensor]:
        """Inputs and targets (B, T) of sequences."""
        longest = max(len(ids) for ids, _ in rows) - 1
        inputs = np.full((len(rows), longest), self._special.pad, np.int64)
        targets = np.full((len(rows), longest), IGNORED, np.int64)
        for row, (ids, first) in enumerate(rows):
            inputs[row, : len(ids) - 1] = ids[:-1]
            targets[row, first - 1 : len(ids) - 1] = ids[first:]
        return {"input_ids": torch.from_numpy(inputs), "targets": torch.from_numpy(targets)}


def _other_speeds(count: int) -> list[float]:
    """So many speeds beside 1, slower and faster ones in turn, those that differ most first."""
    steps = -(-count // 2)
    return [1 + sign * _MOST_SPEED_CHANGE * step / steps for step in range(steps, 0, -1) for sign in (1, -1)][:count]


def _weights_of_books(first: float, num_books: int) -> Tensor:
    """Weights in the loss, (K,), with a mean of 1."""
    rest = num_books - 1
    return torch.tensor([first, *[(num_books - first) / rest] * rest] if rest else [1.0])


class _Spoken:
    """Recordings, at their own speed or another, as tokens."""

    def __init__(
        self, recordings: Recordings, codec: Codec, tokenizer: Tokenizer, text_size: int, speed: float = 1.0
    ) -> None:
        shape = codec.configuration
        offsets = text_size + torch.arange(shape.num_books) * shape.codebook_size
        self.transcripts = recordings.texts
        self.speakers = recordings.speakers
        self.texts = encode_texts(tokenizer, recordings.texts, None, special=False)
        self.codes: list[NDArray[np.int64]] = []
        """Of each recording, (F K,) tokens."""
        with torch.inference_mode():
            for samples in recordings.samples:
                read = to_float(samples) if speed == 1 else resample(to_float(samples), speed, 1.0)
                whole = torch.from_numpy(padded(read, shape.hop_length)).unsqueeze(0)
                self.codes.append((codec.encode(whole)[0] + offsets).flatten().numpy())

    def __len__(self) -> int:
        return len(self.codes)
