"""Audio to codes and back: crops of recordings, each told from what is heard of its codes (models/codec.py).

B recordings of a batch, N samples of a crop, F frames, K books.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from headway_training.batches import Batch, even_batches
from headway_training.data.audio import to_float
from headway_training.data.examples import Splits
from headway_training.data.speech import HEARD
from headway_training.errors import DataError, RecipeError
from headway_training.kinds import ROWS, register
from headway_training.models import Codec, make_configuration
from headway_training.models.codec import CodecConfig
from headway_training.recipes import Recipe
from headway_training.spectra import mel_cepstral_distortion, spectral_loss
from headway_training.tasks.base import IGNORED, EvaluationData, Metrics, Part, RecordingsTask, TrainingBatch

MEASURED_RECORDINGS = 128
"""Recordings that a validation and a checkpoint take of a part."""
_CROP_FRAMES = 50
"""Longest crop."""


@register
class AudioCodingTask(RecordingsTask):
    """Random crops of recordings; the loss of a batch is the sum of its rows' losses."""

    name = "audio_coding"
    unit = "clips"
    metric = "mel_cepstral_distortion"
    higher_is_better = False
    settings = (ROWS,)
    data_of = ("speech_synthesis",)
    own_data = "a table with the column `file`, a recording's path"
    columns = HEARD
    sentence = "Turns speech into codes and back"

    @classmethod
    def sampling_rate(cls, recipe: Recipe) -> int:
        """That of the recipe's model."""
        return _shape_of(recipe).sampling_rate

    def __init__(self, recipe: Recipe, splits: Splits[Any]) -> None:
        super().__init__(recipe, splits)
        self._shape = made = _shape_of(recipe)
        if made.sampling_rate != splits.train.sampling_rate:
            raise DataError(
                f"the recordings have {splits.train.sampling_rate} samples a second, and model.sampling_rate is "
                f"{made.sampling_rate}; set it, or resample them"
            )

    @property
    def num_train_examples(self) -> int:
        """Recordings."""
        return len(self._splits.train)

    def model_fields(self) -> dict[str, int]:
        """None: the recipe says all."""
        return {}

    def checkpoint_fields(self) -> dict[str, Any]:
        """None."""
        return {}

    def before_step(self, model: nn.Module, step: int, num_steps: int) -> None:
        """Forgets what measurements have shown the books."""
        assert isinstance(model, Codec)
        model.quantizer.begin_step()

    def after_step(self, model: nn.Module, step: int, num_steps: int) -> None:
        """Moves the books."""
        assert isinstance(model, Codec)
        model.quantizer.end_step()

    def epoch_batches(self, seed: int, epoch: int) -> list[Batch]:
        """Batches of recordings whose crops are of similar length, in random order: few crops end in silence."""
        size, longest = self._recipe.optimization.batch_size, _CROP_FRAMES * self._shape.hop_length
        lengths = [min(len(samples), longest) for samples in self._splits.train.samples]
        return even_batches(len(lengths), size, lengths, seed=seed, epoch=epoch)

    def collate(self, batch: Batch, generator: torch.Generator) -> TrainingBatch:
        """Crops (B, N), short recordings followed by silence, draws (B, F), and targets (B), all 0."""
        frames = max(-(-len(self._splits.train.samples[number]) // self._shape.hop_length) for number in batch)
        length = min(frames, _CROP_FRAMES) * self._shape.hop_length
        crops = np.zeros((len(batch), length), np.float32)
        for row, number in enumerate(batch):
            samples = self._splits.train.samples[number]
            spare = max(0, len(samples) - length)
            start = int(torch.randint(spare + 1, (), generator=generator))
            part = samples[start : start + length]
            crops[row, : len(part)] = to_float(part)
        tensors = {
            "samples": torch.from_numpy(crops),
            "draws": torch.rand(len(batch), length // self._shape.hop_length, generator=generator),
            "targets": torch.zeros(len(batch), dtype=torch.int64),
        }
        return TrainingBatch(tensors=tensors, num_units=len(batch))

    def logits(self, model: nn.Module, tensors: Mapping[str, Tensor]) -> Tensor:
        """The loss of each row, (B): what is predicted are samples, not classes."""
        samples, ignored = tensors["samples"], tensors["targets"] == IGNORED
        found, quantizer_loss = model(samples, tensors["draws"].masked_fill(ignored[:, None], -1.0))
        losses: Tensor = spectral_loss(found, samples, self._shape.sampling_rate) + quantizer_loss.float()
        return losses

    def loss(self, model: nn.Module, tensors: Mapping[str, Tensor], label_smoothing: float = 0.0) -> Tensor:
        """The loss summed over rows."""
        return self.logits(model, tensors).masked_fill(tensors["targets"] == IGNORED, 0.0).sum()

    @torch.inference_mode()
    def evaluate(self, model: nn.Module, part: Part) -> Metrics:
        """Mel-cepstral distortion in decibels, the mean over recordings."""
        assert isinstance(model, Codec)
        recordings = self._splits.valid if part == "valid" else self._splits.test
        device = next(model.parameters()).device
        distortions = []
        for samples in recordings.samples[:MEASURED_RECORDINGS]:
            whole = padded(to_float(samples), self._shape.hop_length)
            heard = model.decode(model.encode(torch.from_numpy(whole).unsqueeze(0).to(device)))[0]
            distortions.append(
                mel_cepstral_distortion(heard[0].float().cpu().numpy(), whole, self._shape.sampling_rate)
            )
        return {"mel_cepstral_distortion": float(np.mean(distortions))}

    def measure_baseline(self) -> None:
        """None: no simple method has so few bits."""

    def evaluation_data(self) -> EvaluationData:
        """Test recordings, one after another, with their lengths."""
        samples = self._splits.test.samples[:MEASURED_RECORDINGS]
        return EvaluationData(arrays={"samples": np.concatenate(samples), "lengths": np.array([*map(len, samples)])})


def _shape_of(recipe: Recipe) -> CodecConfig:
    """The configuration of a recipe's codec.

    Raises:
        RecipeError: A field of it is out of its range.
    """
    try:
        made = make_configuration(recipe.architecture, recipe.configuration)
    except ValueError as error:
        raise RecipeError(f"model: {error}") from error
    assert isinstance(made, CodecConfig)
    return made


def padded(samples: NDArray[np.float32], hop_length: int) -> NDArray[np.float32]:
    """Samples (S,), followed by silence up to a whole frame."""
    return np.pad(samples, (0, -len(samples) % hop_length))
