"""What a classifier's logits are worth: its metric, its calibration, and what it is bad at.

N examples, C labels.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from headway_export import weaknesses
from headway_export.candidate import encode
from headway_export.source import EvaluationData, ExportSource
from headway_server.bundles import CalibrationFigures, ClassificationScheme
from headway_training.calibration import NUM_BINS, calibration_metrics, to_probabilities
from headway_training.metrics import multi_label_f1
from headway_training.tokenizers import encode_pairs


def encode_inputs(
    source: ExportSource, data: EvaluationData
) -> tuple[list[NDArray[np.int64]], list[NDArray[np.int64]] | None]:
    """Tokenizes evaluation texts as a server does, cut to the model's length.

    Returns:
        The ids of each input, and the types of its tokens where texts are paired.
    """
    assert source.tokenizer is not None, "a text model has its tokenizer"
    limit = source.limits.max_input_tokens
    assert limit is not None, "the source has read the module's length"
    if data.text_pairs is None:
        return [ids[:limit] for ids in encode(source.tokenizer, data.texts, add_special_tokens=True)], None
    ids, types = encode_pairs(source.tokenizer, data.texts, data.text_pairs, limit)
    return [np.array(row, np.int64) for row in ids], [np.array(row, np.int64) for row in types]


def accuracy(
    logits: NDArray[np.float32], source: ExportSource, data: EvaluationData
) -> tuple[float, tuple[str, ...], CalibrationFigures]:
    """Measures logits of one label an example, (N, C): accuracy in percent, weak points, calibration."""
    scheme = source.classification or ClassificationScheme()
    value = float((logits.argmax(axis=-1) == data.labels).mean() * 100)
    scaled = logits / np.float32(scheme.temperature)
    weak_points = weaknesses.of_classes(scaled, data.labels, source.labels, data.texts)
    return value, weak_points, _calibration(logits, data, scheme)


def micro_f1(
    logits: NDArray[np.float32], source: ExportSource, data: EvaluationData
) -> tuple[float, tuple[str, ...], CalibrationFigures]:
    """Measures logits of several labels an example, (N, C): micro F1 in percent, weak points, calibration."""
    scheme = source.classification or ClassificationScheme()
    selected = to_probabilities(logits / scheme.temperature, multi_label=True) >= np.asarray(
        scheme.thresholds or (0.5,)
    )  # (N, C)
    value, _ = multi_label_f1(selected, data.labels)
    by_label = {
        label: multi_label_f1(selected[:, [index]], data.labels[:, [index]])[0]
        for index, label in enumerate(source.labels)
        if data.labels[:, index].any()
    }
    hardest = sorted(by_label, key=by_label.__getitem__)[: weaknesses.NUM_EXAMPLES]
    weak_points = (f"Lowest F1: {'; '.join(f'{label} {by_label[label]:.1f} %' for label in hardest)}.",)
    return value, weak_points, _calibration(logits, data, scheme)


def _calibration(logits: NDArray[np.float32], data: EvaluationData, scheme: ClassificationScheme) -> CalibrationFigures:
    metrics = calibration_metrics(logits, data.labels, scheme.temperature, multi_label=scheme.kind == "multi_label")
    return CalibrationFigures(
        expected_calibration_error=metrics["expected_calibration_error"],
        uncalibrated=metrics["expected_calibration_error_uncalibrated"],
        bin_count=NUM_BINS,
    )
