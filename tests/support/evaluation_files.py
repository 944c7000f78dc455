"""The evaluation data of a checkpoint, read back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headway_training.checkpoint import IMAGE_EVALUATION_FILE, TEXT_EVALUATION_FILE


def read_text_evaluation(path: Path) -> list[dict[str, Any]]:
    """Reads the objects of `evaluation.jsonl` in the folder `path`."""
    return [json.loads(line) for line in (path / TEXT_EVALUATION_FILE).read_text(encoding="utf-8").splitlines()]


def read_image_evaluation(path: Path) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Reads `evaluation.npz` in the folder `path`: (N, height, width, 3) pixels and (N,) labels."""
    with np.load(path / IMAGE_EVALUATION_FILE) as arrays:
        return arrays["images"], arrays["labels"]
