"""Tiny segmenters of Hugging Face `transformers` with random weights, in folders with `preprocessor_config.json`."""

import json
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import transformers
from torch.nn import functional

SIDE = 64
"""Pixels along a side of a model's input."""
_VISION = {
    "hidden_size": 32,
    "output_channels": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": SIDE,
    "patch_size": 16,
    "window_size": 3,
    "global_attn_indexes": [1],
    "num_pos_feats": 16,
    "mlp_ratio": 2.0,
}
_PROMPTS = {"hidden_size": 32, "image_size": SIDE, "patch_size": 16, "mask_input_channels": 8}
_MASKS = {"hidden_size": 32, "mlp_dim": 48, "num_attention_heads": 2, "iou_head_hidden_dim": 32}
_SAM = {"vision_config": _VISION, "prompt_encoder_config": _PROMPTS, "mask_decoder_config": _MASKS}
_SAM2 = {
    "vision_config": {
        "backbone_config": {
            "model_type": "sam2_hiera_det_model",
            "hidden_size": 16,
            "image_size": [SIDE, SIDE],
            "blocks_per_stage": [1, 1, 2, 1],
            "embed_dim_per_stage": [16, 32, 48, 64],
            "num_attention_heads_per_stage": [1, 2, 2, 2],
            "window_size_per_stage": [4, 4, 2, 2],
            "global_attention_blocks": [3],
            "window_positional_embedding_background_size": [4, 4],
        },
        "backbone_channel_list": [64, 48, 32, 16],
        "backbone_feature_sizes": [[16, 16], [8, 8], [4, 4]],
        "fpn_hidden_size": 32,
    },
    "prompt_encoder_config": _PROMPTS,
    "mask_decoder_config": _MASKS | {"num_hidden_layers": 1, "dynamic_multimask_stability_thresh": 0.87},
}
_NORMALIZED = {
    "do_resize": True,
    "resample": 2,
    "do_rescale": True,
    "rescale_factor": 1 / 255,
    "do_normalize": True,
    "image_mean": [0.485, 0.456, 0.406],
    "image_std": [0.229, 0.224, 0.225],
}
_PADDED = {
    "image_processor_type": "SamImageProcessor",
    **_NORMALIZED,
    "size": {"longest_edge": SIDE},
    "do_pad": True,
    "pad_size": {"height": SIDE, "width": SIDE},
}
_SQUARE = {"image_processor_type": "Sam2ImageProcessorFast", **_NORMALIZED, "size": {"height": SIDE, "width": SIDE}}
FAMILIES = {
    "sam": ("Sam", _SAM, _PADDED),
    "sam2": ("Sam2", _SAM2, _SQUARE),
    "sam2_video": ("Sam2", _SAM2, _SQUARE),
}
"""Prefix of the classes, configuration and preprocessing of each family, by model type."""
_DEVIATIONS = {"positional_embedding": 0.5, "rel_pos": 0.3, "pos_embed": 0.3, "iou": 0.3}
"""Of weights, by a part of their names."""


def write_segmenter(folder: Path, family: str, **preprocessing) -> Path:
    """Writes a segmenter, whose masks differ from prompt to prompt."""
    prefix, values, written = FAMILIES[family]
    config = getattr(transformers, f"{prefix}Config")(**values)
    torch.manual_seed(7)
    model = getattr(transformers, f"{prefix}Model")(config)
    with torch.no_grad():
        for name, parameter in (*model.named_parameters(), *model.named_buffers()):
            if parameter.ndim > 1:
                parameter.normal_(std=next((std for part, std in _DEVIATIONS.items() if part in name), 0.2))
        if family.startswith("sam2"):  # one table in two places
            table = model.shared_image_embedding.positional_embedding
            model.prompt_encoder.shared_embedding.positional_embedding.copy_(table)
    model.save_pretrained(folder)
    if family == "sam2_video":  # as the published folders say
        file = folder / "config.json"
        content = json.loads(file.read_text()) | {"model_type": family, "architectures": ["Sam2VideoModel"]}
        file.write_text(json.dumps(content))
    (folder / "preprocessor_config.json").write_text(json.dumps(written | preprocessing))
    return folder


class Prompt(NamedTuple):
    """Shares of an image."""

    points: tuple[tuple[float, float], ...] = ()
    labels: tuple[int, ...] = ()
    box: tuple[float, float, float, float] | None = None

    def scaled(self, width: int, height: int) -> "Prompt":
        """In pixels."""
        points = tuple((x * width, y * height) for x, y in self.points)
        return self._replace(points=points, box=self.box and tuple(np.multiply(self.box, (width, height) * 2).tolist()))


POINT = Prompt(points=((0.4, 0.3),), labels=(1,))
BOX = Prompt(box=(0.1, 0.25, 0.8, 0.9))
SEVERAL = (
    Prompt(points=((0.4, 0.3), (0.7, 0.75)), labels=(1, 0)),
    Prompt(points=((0.4, 0.3), (0.9, 0.1), (0.2, 0.6)), labels=(1, 1, 0)),
    Prompt(points=((0.5, 0.5), (0.3, 0.8)), labels=(0, 1), box=(0.1, 0.25, 0.8, 0.9)),
)


class Library:
    """A folder's model and processor of `transformers`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model = transformers.AutoModelForMaskGeneration.from_pretrained(folder).eval()
        self._is_square = hasattr(self.model, "no_memory_embedding")
        kind = transformers.ViTImageProcessorPil if self._is_square else transformers.SamImageProcessorPil
        self._images = kind.from_pretrained(folder)  # that of SAM 2 needs torchvision

    def answer(self, image, prompt: Prompt, *, several: bool, earlier=None):
        """Masks of an image's pixels (M, H, W), their IoU (M,) and logits of cells (M, S, S); `several` if M is 3."""
        scaled = prompt.scaled(*image.size)
        inputs = self._inputs(image, scaled)
        masks = None if earlier is None else torch.from_numpy(earlier)[None, None]
        with torch.inference_mode():
            output = self.model(**inputs["model"], input_masks=masks, multimask_output=several)
        size = image.size[::-1]
        if self._is_square:
            [pixels] = [functional.interpolate(output.pred_masks[0], size, mode="bilinear", align_corners=False) > 0]
        else:
            [pixels] = self._images.post_process_masks(output.pred_masks, [size], inputs["sizes"])
        return pixels[0].numpy(), output.iou_scores[0, 0].numpy(), output.pred_masks[0, 0].numpy()

    def _inputs(self, image, prompt: Prompt):
        given = {
            "input_points": [[list(prompt.points)]] if prompt.points else None,
            "input_labels": [[list(prompt.labels)]] if prompt.points else None,
            "input_boxes": [[list(prompt.box)]] if prompt.box else None,
        }
        if self._is_square:  # as `Sam2Processor` does
            scale = SIDE / np.array(image.size)
            scaled = {"input_points": scale, "input_labels": 1, "input_boxes": np.tile(scale, 2)}
            tensors = {
                name: None
                if value is None
                else torch.tensor(np.multiply(value, scaled[name])).to(
                    torch.int64 if name == "input_labels" else torch.float32
                )
                for name, value in given.items()
            }
            return {"model": {**self._images(image, return_tensors="pt"), **tensors}}
        given = {name: value for name, value in given.items() if value is not None}
        found = transformers.SamProcessor(self._images)(image, return_tensors="pt", **given)
        sizes, _ = found.pop("reshaped_input_sizes"), found.pop("original_sizes")
        return {"model": dict(found), "sizes": sizes}
