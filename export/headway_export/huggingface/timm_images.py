"""How images of timm's models are prepared, as their folders state it: timm's `transforms_factory` has the meanings."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from headway_server.bundles import ImagePreprocessing


@dataclass(frozen=True, slots=True)
class TimmImageProcessor:
    """The image processor that `transformers` makes of timm's own transforms."""

    own: Any
    """`TimmWrapperImageProcessor`."""

    def __call__(self, picture: Image.Image, *, return_tensors: str) -> dict[str, NDArray[np.float32]]:
        """Returns `pixel_values`, float32 (1, 3, height, width); whatever is asked for, NumPy's."""
        assert return_tensors == "np"
        return {"pixel_values": self.own(picture, return_tensors="pt")["pixel_values"].numpy()}

    def preprocessing(self) -> ImagePreprocessing:
        """Says it in the manifest's words.

        Raises:
            ValueError: There are no such words.
        """
        stated = self.own.data_config
        channels, height, width = (int(size) for size in stated["input_size"])
        if channels != 3:
            raise ValueError(f"images have {channels} channels, and 3 are read")
        sizes: dict[str, Any] = {"height": height, "width": width}
        edges = [math.floor(side / stated["crop_pct"]) for side in (height, width)]
        if stated["crop_mode"] == "center" and height == width:
            sizes |= {"resize": "shorter_side", "resize_size": edges[0], "rounding": "down"}
        elif stated["crop_mode"] == "squash" and (height == width or edges == [height, width]):
            sizes |= {"resize": "stretch"} | ({} if edges == [height, width] else {"resize_size": edges[0]})
        else:
            raise ValueError(f"images are cropped to {height} x {width} by {stated['crop_mode']}")
        mean, std = (tuple(float(value) for value in stated[name]) for name in ("mean", "std"))
        return ImagePreprocessing(
            **sizes, crop_rounding="even", interpolation=stated["interpolation"], mean=mean, std=std
        )
