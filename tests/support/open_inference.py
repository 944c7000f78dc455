"""What tests of the Open Inference Protocol send."""

import io

import numpy as np
from PIL import Image

from headway.oip import grpc_predict_v2_pb2 as pb

GENERATION, CHAT, TRANSLATION = "tiny-generation", "tiny-chat", "tiny-translation"


def text(*elements: str | bytes) -> np.ndarray:
    """A tensor of texts, (N,)."""
    return np.array([each.encode() if isinstance(each, str) else each for each in elements], object)


def picture(colour: tuple[int, int, int]) -> bytes:
    """A PNG file."""
    file = io.BytesIO()
    Image.new("RGB", (40, 30), colour).save(file, "PNG")
    return file.getvalue()


def infer_request(model: str, *texts: str, request_id: str = "") -> pb.ModelInferRequest:
    """A request of typed texts."""
    request = pb.ModelInferRequest(model_name=model, id=request_id)
    tensor = request.inputs.add(name="text", datatype="BYTES", shape=[len(texts)])
    tensor.contents.bytes_contents.extend(each.encode() for each in texts)
    return request
