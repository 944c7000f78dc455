"""An image as the server decodes it, before it is resized for a model."""

from PIL import Image

from headway_server.preprocessing import ImageLimits
from headway_server.preprocessing.image import _decode, _open_header


def decode_image(data: bytes, *, field: str = "images[0]", limits: ImageLimits) -> Image.Image:
    """Decodes a file: upright, RGB."""
    return _decode(_open_header(data, field, limits), field)
