"""What every classifier's peer runs: a bundle's graph on ONNX Runtime, with what stands before and behind it.

It knows nothing of headway but the files of its bundle. B inputs of a batch, T tokens of the longest text, C classes.
"""

import base64
import json
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from tokenizers import Tokenizer


class Inputs:
    """What a graph reads, and what its outputs are called."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._manifest = json.loads((folder / "bundle.json").read_text(encoding="utf-8"))
        self._images = self._manifest["image_preprocessing"]
        self._tokenizer = None if self._images else Tokenizer.from_file(str(folder / "tokenizer.json"))

    def graph_file(self, precision: str) -> Path:
        """Returns the ONNX file of a variant."""
        return self._folder / str(self._manifest["variants"][precision]["graphs"]["model"]["file"])

    def prepare(self, text: str) -> NDArray[Any]:
        """Prepares a text, or an image in base64: ids (T), or pixels (3, height, width)."""
        if self._tokenizer is not None:
            return np.array(self._tokenizer.encode(text).ids[: self._manifest["limits"]["max_input_tokens"]], np.int64)
        settings, image = self._images, Image.open(BytesIO(base64.b64decode(text))).convert("RGB")
        size = width, height = settings["width"], settings["height"]
        if settings["resize"] == "shorter_side":
            scale = settings["resize_size"] / min(image.size)
            size = (round(image.width * scale), round(image.height * scale))
        left, top = (size[0] - width) // 2, (size[1] - height) // 2
        image = image.resize(size, Image.Resampling[settings["interpolation"].upper()])
        pixels = np.asarray(image.crop((left, top, left + width, top + height)), np.float32) / np.float32(255)
        mean, std = (np.array(settings[name], np.float32) for name in ("mean", "std"))
        return np.ascontiguousarray(((pixels - mean) / std).transpose(2, 0, 1))

    def collate(self, items: Sequence[NDArray[Any]]) -> dict[str, NDArray[Any]]:
        """Makes the graph's inputs; texts are padded to the longest."""
        if self._images:
            return {"pixel_values": np.stack(items)}
        shape = len(items), max(map(len, items))
        pad_id = (self._manifest["special_tokens"] or {}).get("pad") or 0
        input_ids, mask = np.full(shape, pad_id, np.int64), np.zeros(shape, np.int64)  # (B, T)
        for row, ids in enumerate(items):
            input_ids[row, : len(ids)], mask[row, : len(ids)] = ids, 1
        return {"input_ids": input_ids, "attention_mask": mask}

    def labels_of(self, logits: NDArray[np.float32]) -> list[dict[str, Any]]:
        """Returns the likeliest label of each row with its probability: (B, C)."""
        weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
        best, probabilities = logits.argmax(axis=-1), weights.max(axis=-1) / weights.sum(axis=-1)
        labels = self._manifest["labels"]
        return [{"label": labels[i], "probability": float(p)} for i, p in zip(best, probabilities, strict=True)]


class Classifier:
    """Texts or images to their likeliest label."""

    def __init__(self, folder: Path, precision: str, threads: int, device: str = "cpu") -> None:
        import onnxruntime  # noqa: PLC0415 (OpenVINO's process prepares inputs without it)

        self.inputs = Inputs(folder)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        options.log_severity_level = 3
        provider = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}[device]
        file = str(self.inputs.graph_file(precision))
        self._session = onnxruntime.InferenceSession(file, options, providers=[provider])

    def classify(self, items: Sequence[NDArray[Any]]) -> list[dict[str, Any]]:
        """Runs one batch of prepared inputs."""
        return self.inputs.labels_of(self.run(self.inputs.collate(items)))

    def run(self, feeds: dict[str, NDArray[Any]]) -> NDArray[np.float32]:
        """Runs the graph: logits (B, C)."""
        logits: NDArray[np.float32] = self._session.run(["logits"], feeds)[0]
        return logits
