"""Text classification where any number of labels may apply: each is a decision of its own.

B rows, N examples, C labels.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 (torch's own convention)

from headway_training.baselines import multi_label_bayes_baseline
from headway_training.batches import Batch
from headway_training.calibration import (
    DEFAULT_THRESHOLD,
    calibration_metrics,
    choose_thresholds,
    fit_temperature,
    sigmoid,
)
from headway_training.checkpoint import Baseline, Classification
from headway_training.data.examples import MultiLabeledTexts
from headway_training.metrics import multi_label_f1
from headway_training.tasks.base import IGNORED, Metrics
from headway_training.tasks.text_classification import TextTask


class MultiLabelTask(TextTask[MultiLabeledTexts]):
    """Texts with any number of labels each.

    The best weights are selected by micro F1 with every threshold at 0.5; thresholds are chosen for the weights that
    were selected.
    """

    metric = "micro_f1"
    _thresholds: tuple[float, ...] | None = None

    def loss_of_logits(self, logits: Tensor, targets: Tensor, label_smoothing: float = 0.0) -> Tensor:
        """Binary cross-entropy of logits, (B, C), summed over rows and labels; targets (B, C)."""
        smoothed = targets.float() * (1 - label_smoothing) + label_smoothing / 2
        losses = F.binary_cross_entropy_with_logits(logits, smoothed, reduction="none")
        return losses.masked_fill(targets == IGNORED, 0.0).sum()

    def evaluate(self, model: nn.Module, part: Literal["valid", "test"]) -> Metrics:
        """Micro and macro F1, in percent; of test data, the expected calibration error too."""
        examples = self._splits.valid if part == "valid" else self._splits.test
        logits, truth = self._evaluation_logits(model, examples), self._matrix(examples)
        thresholds = self._thresholds or (DEFAULT_THRESHOLD,) * truth.shape[1]
        micro, macro = multi_label_f1(sigmoid(logits / self._temperature) >= np.asarray(thresholds), truth)
        metrics: Metrics = {"micro_f1": micro, "macro_f1": macro}
        if part == "test":
            metrics |= calibration_metrics(logits, truth, self._temperature, multi_label=True)
        return metrics

    def calibrate(self, model: nn.Module) -> None:
        """Fits the temperature, and chooses the thresholds."""
        logits, truth = self._evaluation_logits(model, self._splits.valid), self._matrix(self._splits.valid)
        self._temperature = fit_temperature(logits, truth, multi_label=True)
        self._thresholds = choose_thresholds(sigmoid(logits / self._temperature), truth)

    def measure_baseline(self) -> Baseline:
        """Naive Bayes on word counts, a label at a time."""
        return multi_label_bayes_baseline(self._splits.train, self._splits.test, len(self._splits.labels))

    def _classification(self) -> Classification:
        thresholds = self._thresholds or (DEFAULT_THRESHOLD,) * len(self._splits.labels)
        return Classification(kind="multi_label", temperature=self._temperature, thresholds=thresholds)

    def _targets(self, examples: MultiLabeledTexts, batch: Batch) -> Tensor:
        """(B, C), 1 where a label applies."""
        return torch.from_numpy(one_hot([examples.labels[i] for i in batch], len(self._splits.labels)))

    def _matrix(self, examples: MultiLabeledTexts) -> NDArray[np.int64]:
        """(N, C)."""
        return one_hot(examples.labels, len(self._splits.labels))

    def _label(self, label: Any) -> dict[str, Any]:
        return {"labels": list(label)}


def one_hot(labels: list[tuple[int, ...]], num_labels: int) -> NDArray[np.int64]:
    """1 where a label applies and 0 elsewhere: int64 (N, C)."""
    matrix = np.zeros((len(labels), num_labels), np.int64)
    for row, several in enumerate(labels):
        matrix[row, list(several)] = 1
    return matrix
