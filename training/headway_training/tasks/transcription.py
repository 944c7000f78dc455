"""Transcription: predict the next token of what is said from a window of audio and the transcript so far.

B windows, N samples, M mel bins, F frames, T tokens of a transcript, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 (torch's own convention)

from headway_training.batches import Batch
from headway_training.checkpoint import Baseline
from headway_training.data.audio import LogMel, resample, to_float
from headway_training.data.captions import language_token
from headway_training.data.examples import Splits
from headway_training.data.speech import TRANSCRIBED, Recordings
from headway_training.errors import DataError, RecipeError
from headway_training.evaluation import pad, write_greedily
from headway_training.kinds import ROWS, SMOOTHING, register
from headway_training.metrics import score_transcripts
from headway_training.models import Transcriber
from headway_training.models.own import MODULE, OwnModule
from headway_training.models.parts.attention import Kernel
from headway_training.models.writer import target_states
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
    language_token_id,
)
from headway_training.tokenizers import encode_texts

_NUM_STARTS = 2
"""Tokens that a transcript begins with: `bos`, and that of its language."""
_LONGEST_PAUSE_S = 0.4
"""Before a recording of a window."""
_NOISE_DECIBELS = (5.0, 35.0)
"""Of the speech above the noise."""
_HIDDEN_PLACES = 2
"""Where frames of a window are hidden."""
_BASELINE_FRAMES = 16
"""Frames that a recording is averaged to for the baseline."""


@register
class TranscriptionTask(RecordingsTask, TextTask):
    """Windows of one recording or several, in random order."""

    name = "transcription"
    unit = "windows"
    metric = "wer"
    higher_is_better = False
    settings = (
        *(ROWS, SMOOTHING, "tokenizer", "audio", "speech.language", "speech.least_source_share"),
        *("speech.join_share", "speech.silence_share", "speech.speed_change", "speech.gain_change"),
        *("speech.noise_share", "speech.hidden_bands", "speech.hidden_frames", "speech.alignment_share"),
    )
    sections = ("audio",)
    described = ("special_tokens", "language_tokens", "audio_preprocessing")
    sentence = "Writes what is said"
    frame = "$A <eos>"
    own_data = "a table with the columns `file`, a recording's path, and `transcript`"
    columns = TRANSCRIBED
    takes_modules = True
    in_order = "target_ids"

    @classmethod
    def check_recipe(cls, recipe: Recipe) -> None:
        """Of a module of one's own the positions of the encoder spell nothing."""
        super().check_recipe(recipe)
        if recipe.architecture == MODULE and recipe.speech.alignment_share:
            raise ValueError("speech.alignment_share must be 0: it is for the kit's own encoder")

    @classmethod
    def sampling_rate(cls, recipe: Recipe) -> int:
        """That of [audio]."""
        assert recipe.audio is not None, "the recipe demands it"
        return recipe.audio.sampling_rate

    @classmethod
    def run_module(cls, module: nn.Module, kernel: Kernel, *inputs: Tensor) -> Tensor:
        """Hears windows, (B, M, F), and reads transcripts so far, (B, T)."""
        input_features, target_ids = inputs
        writer: Any = module
        keys_values = writer.cross_keys_values(writer.encode(input_features))
        logits: Tensor = writer.logits(target_states(writer, kernel, target_ids, keys_values))
        return logits

    @classmethod
    def training_texts(cls, train: Recordings) -> list[str]:
        """The transcripts."""
        return spaced(train.texts)

    @classmethod
    def marks(cls, recipe: Recipe, train: Recordings) -> list[str]:
        """That of the language."""
        return [language_token(recipe.speech.language)]

    def __init__(self, recipe: Recipe, splits: Splits[Any], tokenizer: Tokenizer) -> None:
        assert recipe.audio is not None, "the recipe demands it"
        super().__init__(recipe, splits)
        self.tokenizer = tokenizer
        self._audio = recipe.audio
        self._special = SpecialIds(tokenizer)
        self._mark = language_token_id(tokenizer, recipe.speech.language)
        self._log_mel = LogMel(recipe.audio)
        self._max_length = int(recipe.model["max_target_length"]) - _NUM_STARTS
        train: Recordings = splits.train
        if train.sampling_rate != recipe.audio.sampling_rate:
            raise RecipeError(
                f"audio.sampling_rate is {recipe.audio.sampling_rate}, and the recordings have {train.sampling_rate} "
                "samples a second; set it to that"
            )
        self._tokens = encode_texts(tokenizer, spaced(train.texts), None, special=False)
        fits = [
            row
            for row, (samples, tokens) in enumerate(zip(train.samples, self._tokens, strict=True))
            if len(samples) <= recipe.audio.window_samples and len(tokens) <= self._max_length
        ]
        self._by_source: dict[str, list[int]] = {}
        for row in fits:
            self._by_source.setdefault(train.sources[row], []).append(row)
        if not fits:
            raise DataError(
                f"no recording is at most {self._window_s:g} s long with at most {self._max_length} tokens; raise "
                "audio.num_frames or model.max_target_length"
            )
        for measured in (splits.valid, splits.test):
            row = max(range(len(measured)), key=lambda one: len(measured.samples[one]))
            longest = len(measured.samples[row]) / measured.sampling_rate
            if longest > self._window_s:
                raise DataError(
                    f"a recording to measure on, number {row + 1} ({measured.texts[row][:40]!r}), has {longest:.1f} s, "
                    f"and a window {self._window_s:g}; cut it, or raise audio.num_frames"
                )
        if num_long := len(train) - len(fits):
            self.notes = (
                f"recordings of more than {self._window_s:g} s or {self._max_length} tokens are left out: {num_long:,}",
            )
        self._features: dict[Part, Tensor] = {}

    @property
    def _window_s(self) -> float:
        return self._audio.window_samples / self._audio.sampling_rate

    @property
    def num_train_examples(self) -> int:
        """Recordings that are trained on."""
        return sum(map(len, self._by_source.values()))

    def model_fields(self) -> dict[str, int]:
        """The vocabulary, and the size of a window."""
        return {
            "vocabulary_size": self.tokenizer.get_vocab_size(),
            "num_mel_bins": self._audio.num_mel_bins,
            "num_frames": self._audio.num_frames,
        }

    def checkpoint_fields(self) -> dict[str, Any]:
        """Special tokens, language and preprocessing."""
        return {
            "special_tokens": self._special.tokens,
            "language_tokens": {self._recipe.speech.language: self._mark},
            "audio_preprocessing": self._audio,
        }

    def epoch_batches(self, seed: int, epoch: int) -> list[Batch]:
        """Batches of the recordings that windows begin with: all once, those of small sources several times."""
        random = np.random.default_rng((seed, epoch))
        least = round(self._recipe.speech.least_source_share * self.num_train_examples)
        drawn: list[NDArray[np.int64]] = []
        for rows in self._by_source.values():
            count = max(len(rows), least)
            passes = -(-count // len(rows))
            drawn.append(np.concatenate([random.permutation(rows) for _ in range(passes)])[:count])
        order, size = random.permutation(np.concatenate(drawn)), self._recipe.optimization.batch_size
        return [order[start : start + size] for start in range(0, len(order), size)]

    def collate(self, batch: Batch, generator: torch.Generator) -> TrainingBatch:
        """Features (B, M, F), transcripts shifted right and targets, both (B, T).

        The token of the language is not predicted.
        """
        random = np.random.default_rng(int(torch.randint(2**62, (1,), generator=generator)))
        windows, rows = zip(*(self._make_window(int(i), random) for i in batch), strict=True)
        features = self._log_mel.features(torch.from_numpy(np.stack(windows)))
        special = self._special
        tensors = {
            "input_features": self._hide(features, random),
            "target_ids": pad([[special.bos, self._mark, *ids] for ids in rows], special.pad),
            "targets": pad([[IGNORED, *ids, special.eos] for ids in rows], IGNORED),
        }
        return TrainingBatch(tensors=tensors, num_units=len(batch))

    def _make_window(self, first: int, random: np.random.Generator) -> tuple[NDArray[np.float32], list[int]]:
        """A window, float (N,), that begins with a recording, and the tokens of what is said in it."""
        settings, length = self._recipe.speech, self._audio.window_samples
        window, tokens = np.zeros(length, np.float32), list[int]()
        train: Recordings = self._splits.train
        same = self._by_source[train.sources[first]]
        num_most = 0 if random.random() < settings.silence_share else 1
        if num_most and random.random() < settings.join_share:
            num_most = len(same)
        row, place = first, 0
        for number in range(num_most):
            samples = self._change_speed(train.samples[row], random)
            pause = int(random.uniform(0, _LONGEST_PAUSE_S) * self._audio.sampling_rate)
            place += pause if number else min(pause, max(0, length - len(samples)))
            if place + len(samples) > length or len(tokens) + len(self._tokens[row]) > self._max_length:
                break
            window[place : place + len(samples)] = samples
            tokens += self._tokens[row]
            place += len(samples)
            row = int(random.choice(same))
        if random.random() < settings.noise_share:
            window += _noise(length, random) * _level(window) * 10 ** (-random.uniform(*_NOISE_DECIBELS) / 20)
        gain = 10 ** (random.uniform(-1, 1) * settings.gain_change / 20)
        return np.clip(window * np.float32(gain), -1, 1), tokens

    def _change_speed(self, recording: NDArray[np.int16], random: np.random.Generator) -> NDArray[np.float32]:
        """Makes a recording faster or slower; it stays as it is where it would no longer fit into a window."""
        samples = to_float(recording)
        change = self._recipe.speech.speed_change
        speed = 1 + random.uniform(-change, change)
        if not change or len(samples) > speed * self._audio.window_samples - 1:
            return samples
        return resample(samples, speed, 1.0)

    def _hide(self, features: Tensor, random: np.random.Generator) -> Tensor:
        """Sets neighbouring bins and frames of each window, (B, M, F), to its mean (Park et al. 2019, section 2)."""
        settings = self._recipe.speech
        _, num_bins, num_frames = features.shape
        for window in features:
            mean = window.mean()
            height = int(random.integers(0, min(settings.hidden_bands, num_bins) + 1))
            bottom = int(random.integers(0, num_bins - height + 1))
            window[bottom : bottom + height] = mean
            for _ in range(_HIDDEN_PLACES):
                width = int(random.integers(0, min(settings.hidden_frames, num_frames) + 1))
                start = int(random.integers(0, num_frames - width + 1))
                window[:, start : start + width] = mean
        return features

    def loss(self, model: nn.Module, tensors: Mapping[str, Tensor], label_smoothing: float = 0.0) -> Tensor:
        """As `Task.loss`; a share of it may be that of transcripts which the encoder's positions spell.

        The encoder alone is to tell of each position which token is said there, or none, so that it learns what is
        said where before the decoder has found where to look (Watanabe et al. 2017, section II.C). It does so with the
        decoder's output matrix, in which `pad` means none.
        """
        if isinstance(model, OwnModule):
            return super().loss(model, tensors, label_smoothing)
        assert isinstance(model, Transcriber)
        share = self._recipe.speech.alignment_share
        memory = model.encode(tensors["input_features"])
        targets = tensors["targets"]
        logits = model.write(memory, tensors["target_ids"]).float()
        loss = self.loss_of_logits(logits, targets, label_smoothing)
        if not share or memory.is_meta:  # torch has no shapes alone of what follows, for the estimate of memory
            return loss
        is_said = (targets != IGNORED) & (targets != self._special.eos)
        spelled = F.ctc_loss(
            model.logits(memory).float().log_softmax(dim=-1).transpose(0, 1),  # (S, B, V)
            targets[:, 1:].clamp(min=0),  # from the first that is predicted
            torch.full((len(memory),), memory.shape[1]),
            is_said.sum(dim=1),
            blank=self._special.pad,
            reduction="none",
            zero_infinity=True,
        )
        is_counted = (targets != IGNORED).any(dim=1)
        return (1 - share) * loss + share * spelled.masked_fill(~is_counted, 0.0).sum()

    def logits(self, model: nn.Module, tensors: Mapping[str, Tensor]) -> Tensor:
        """(B, T, V)."""
        logits: Tensor = model(tensors["input_features"], tensors["target_ids"])
        return logits

    def evaluate(self, model: nn.Module, part: Part) -> Metrics:
        """Word error rates of greedy transcripts in percent, of all recordings and of each source."""
        measured: Recordings = getattr(self._splits, part)
        if part not in self._features:
            self._features[part] = torch.stack([self._log_mel.of_recording(one) for one in measured.samples])
        special = self._special
        written = write_greedily(
            cast("Transcriber", model), self._features[part], (special.bos, self._mark), special.eos, batch_size=64
        )
        transcripts = self.tokenizer.decode_batch(written)
        return {**score_transcripts(transcripts, measured.texts, measured.sources)}

    def measure_baseline(self) -> Baseline:
        """The transcript of the recording that is nearest by its spectrogram, averaged to a few frames."""
        train: Recordings = self._splits.train
        test: Recordings = self._splits.test
        rows = [row for several in self._by_source.values() for row in several]
        known, asked = self._pooled([train.samples[row] for row in rows]), self._pooled(test.samples)
        nearest = torch.cdist(asked, known).argmin(dim=1).tolist()
        transcripts = [train.texts[rows[place]] for place in nearest]
        return Baseline(
            name="the transcript of the nearest recording by its spectrogram",
            metric=self.metric,
            value=score_transcripts(transcripts, test.texts, test.sources)["wer"],
        )

    def _pooled(self, recordings: Sequence[NDArray[np.int16]]) -> Tensor:
        """Spectrograms of whole recordings, averaged to equally many frames: (len(recordings), D)."""
        least = self._audio.fft_size
        pooled = []
        for samples in recordings:
            padded = to_float(np.pad(samples, (0, max(0, least - len(samples)))))
            features = self._log_mel.features(torch.from_numpy(padded)[None])
            pooled.append(F.adaptive_avg_pool1d(features, _BASELINE_FRAMES).flatten())
        return torch.stack(pooled)

    def evaluation_data(self) -> EvaluationData:
        """The test recordings, one after another, with their lengths, transcripts and sources."""
        test: Recordings = self._splits.test
        return EvaluationData(
            arrays={
                "rate": np.array(test.sampling_rate),
                "samples": np.concatenate(test.samples),
                "lengths": np.array([len(one) for one in test.samples]),
                "transcripts": np.array(test.texts),
                "sources": np.array(test.sources),
            }
        )


def spaced(transcripts: Sequence[str]) -> list[str]:
    """Transcripts with a space before each, as each may follow another."""
    return [f" {text}" for text in transcripts]


def _level(samples: NDArray[np.float32]) -> float:
    """Root of the mean square of what is not silent; of silence a faint one."""
    loud = samples[samples != 0]
    return float(np.sqrt(np.mean(loud**2))) if len(loud) else 0.01


def _noise(length: int, random: np.random.Generator) -> NDArray[np.float32]:
    """Noise of unit variance whose power falls with the frequency by a random exponent of 0, white, to 2, brown."""
    spectrum = np.fft.rfft(random.standard_normal(length))
    spectrum[1:] *= np.arange(1, len(spectrum)) ** -random.uniform(0, 1)
    spectrum[0] = 0
    noise = np.fft.irfft(spectrum, length)
    scaled: NDArray[np.float32] = (noise / noise.std()).astype(np.float32)
    return scaled
