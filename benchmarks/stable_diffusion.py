"""A model of the kit that draws texts, as the graphs that diffusers' ONNX pipeline reads.

The modules and weights are the kit's. What the pipeline does not say is computed in the graphs: it gives no mask of a
text's tokens, so states at padding are 0 here, and the denoiser attends to those that are not; it names a time by one
of 1000 numbers, which the scheduler (contestants/diffusers.py) gives the kit's noise at that time; and it divides
latents by a factor of Stable Diffusion's.

B rows, C channels and S side of a latent, T tokens of a text, D width of their states, I side of an image.
"""

import logging
import shutil
import warnings
from pathlib import Path
from typing import Final

import onnx
import torch
from torch import Tensor, nn

from headway_training.checkpoint import load_model
from headway_training.models import LatentDiffusion

FACTOR: Final = 0.18215
"""Of latents, in Stable Diffusion."""
NUM_TIMES: Final = 1000
_OPSET: Final = 21
_BATCH: Final = 2
"""That graphs are traced at; any other will do."""


class _TextEncoder(nn.Module):
    def __init__(self, model: LatentDiffusion, pad_id: int) -> None:
        super().__init__()
        assert model.text_encoder is not None, "only models of texts are measured"
        self.text_encoder, self.pad_id = model.text_encoder, pad_id

    def forward(self, input_ids: Tensor) -> Tensor:
        """int32 (B, T) -> float (B, T, D)."""
        mask = (input_ids != self.pad_id).long()
        states: Tensor = self.text_encoder(input_ids.long(), mask) * mask[..., None]
        return states


class _Unet(nn.Module):
    def __init__(self, model: LatentDiffusion) -> None:
        super().__init__()
        self.denoiser = model.denoiser

    def forward(self, sample: Tensor, timestep: Tensor, encoder_hidden_states: Tensor) -> Tensor:
        """Float (B, C, S, S), int64 (1,), float (B, T, D) -> the velocities, float (B, C, S, S)."""
        mask = (encoder_hidden_states != 0).any(dim=-1).long()
        velocity: Tensor = self.denoiser(sample, (timestep.float() + 1) / NUM_TIMES, encoder_hidden_states, mask)
        return velocity


class _Decoder(nn.Module):
    def __init__(self, model: LatentDiffusion) -> None:
        super().__init__()
        self.model = model

    def forward(self, latent_sample: Tensor) -> Tensor:
        """Float (B, C, S, S) -> float (B, 3, I, I), -1 to 1."""
        image: Tensor = self.model.decode(latent_sample * FACTOR) * 2 - 1
        return image


def write_graphs(checkpoint: Path, folder: Path) -> None:
    """Writes the graphs below `folder/fp32`, those of dynamic int8 below `folder/int8`, and the tokenizer.

    The products of denoiser and text encoder are quantized. The decoder's convolutions stay: ONNX Runtime has no
    convolution on the CPU of the integers that it makes of weights.
    """
    # Of the exporter's environment; importing it logs.
    from onnxruntime.quantization import QuantType, quantize_dynamic  # noqa: PLC0415

    model, record = load_model(checkpoint)
    assert isinstance(model, LatentDiffusion), "only models of images are measured"
    assert record.special_tokens is not None, "a model of texts has them"
    assert record.special_tokens.pad is not None, "its texts are padded"
    shape = model.eval().configuration
    ids = torch.zeros(_BATCH, shape.max_length, dtype=torch.int32)
    latents = torch.zeros(_BATCH, *shape.latent_shape)
    states = torch.zeros(_BATCH, shape.max_length, shape.d_model)
    time = torch.zeros(1, dtype=torch.int64)
    for name, module, inputs in (
        ("text_encoder", _TextEncoder(model, record.special_tokens.pad), {"input_ids": ids}),
        ("unet", _Unet(model), {"sample": latents, "timestep": time, "encoder_hidden_states": states}),
        ("vae_decoder", _Decoder(model), {"latent_sample": latents}),
    ):
        file, quantized = (folder / precision / name / "model.onnx" for precision in ("fp32", "int8"))
        file.parent.mkdir(parents=True)
        quantized.parent.mkdir(parents=True)
        _write_graph(file, module, inputs)
        if name == "vae_decoder":
            shutil.copy(file, quantized)
        else:
            graph = onnx.load(file)
            del graph.graph.value_info[:]  # the tracer's shapes of transposed weights are not those that it wrote
            kinds = ["MatMul", "Gemm"]
            quantize_dynamic(graph, quantized, weight_type=QuantType.QInt8, op_types_to_quantize=kinds)
    shutil.copy(checkpoint / "tokenizer.json", folder)


def _write_graph(file: Path, module: nn.Module, inputs: dict[str, Tensor]) -> None:
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)  # it warns of optional packages that are not needed
    batch = torch.export.Dim("batch")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the tracer warns of its own internals
        torch.onnx.export(
            module.eval(),
            tuple(inputs.values()),
            file,
            input_names=list(inputs),
            dynamic_shapes=[{0: batch} if len(value) == _BATCH else {} for value in inputs.values()],
            opset_version=_OPSET,
            dynamo=True,
            external_data=False,
            verbose=False,
        )
