"""Layers and functions that people's own modules are made of, traced at once and held against PyTorch."""

import onnxruntime
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrizations

from headway_export.shortcuts import shortcuts

NAMES = ("tokens", "series", "image", "volume")
LAYERS = {
    "tokens": {
        "lstm": nn.LSTM(8, 6, num_layers=2, batch_first=True),
        "gru": nn.GRU(8, 6, batch_first=True, bidirectional=True),
        "rnn": nn.RNN(8, 6, batch_first=True),
        "encoder layer": nn.TransformerEncoderLayer(8, 2, 16, batch_first=True),
        "encoder": nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2, None, False),
        "layer norm": nn.LayerNorm(8),
        "rms norm": nn.RMSNorm(8),
        "weight norm": parametrizations.weight_norm(nn.Linear(8, 3)),
        "spectral norm": parametrizations.spectral_norm(nn.Linear(8, 3)),
        "dropout": nn.Dropout(),
    },
    "series": {
        "batch norm 1d": nn.BatchNorm1d(8),
        "instance norm 1d": nn.InstanceNorm1d(8, affine=True),
        "convolution 1d": nn.Conv1d(8, 6, 3, padding="same"),
        "transposed convolution 1d": nn.ConvTranspose1d(8, 4, 3, stride=2, output_padding=1),
        "max pool 1d": nn.MaxPool1d(2),
        "average pool 1d": nn.AvgPool1d(3, padding=1, count_include_pad=False),
        "adaptive pool 1d": nn.AdaptiveAvgPool1d(1),
        "glu": nn.GLU(1),
        "replication pad": nn.ReplicationPad1d(1),
        "circular pad": nn.CircularPad1d(1),
        **{name: getattr(nn, name)() for name in (
            "ReLU6", "LeakyReLU", "PReLU", "ELU", "SELU", "CELU", "GELU", "SiLU", "Mish", "Hardswish", "Hardsigmoid",
            "Hardtanh", "Softplus", "Softsign", "Tanhshrink", "LogSigmoid", "Hardshrink", "Softshrink",
        )},
    },
    "image": {
        "batch norm 2d": nn.BatchNorm2d(8),
        "instance norm 2d": nn.InstanceNorm2d(8, track_running_stats=True),
        "group norm": nn.GroupNorm(2, 8),
        "response norm": nn.LocalResponseNorm(3),
        "convolution 2d": nn.Conv2d(8, 6, 3, stride=2, dilation=2, padding=2, groups=2),
        "circular convolution": nn.Conv2d(8, 4, 3, padding=1, padding_mode="circular"),
        "reflecting convolution": nn.Conv2d(8, 4, 3, padding=1, padding_mode="reflect"),
        "transposed convolution 2d": nn.ConvTranspose2d(8, 4, 3, stride=2),
        "max pool 2d": nn.MaxPool2d(3, 2, 1, ceil_mode=True),
        "average pool 2d": nn.AvgPool2d(3, 2),
        "adaptive pool 2d": nn.AdaptiveAvgPool2d(5),
        "adaptive max pool": nn.AdaptiveMaxPool2d(1),
        "bilinear upsample": nn.Upsample(scale_factor=2, mode="bilinear"),
        "bicubic upsample": nn.Upsample(scale_factor=2, mode="bicubic"),
        "pixel shuffle": nn.PixelShuffle(2),
        "pixel unshuffle": nn.PixelUnshuffle(2),
        "channel shuffle": nn.ChannelShuffle(2),
        "unfold": nn.Unfold(3),
        "unflatten": nn.Unflatten(1, (2, 4)),
    },
    "volume": {
        "batch norm 3d": nn.BatchNorm3d(4),
        "convolution 3d": nn.Conv3d(4, 2, 3),
        "max pool 3d": nn.MaxPool3d(2),
    },
}  # fmt: skip
FUNCTIONS = {
    "cumsum": lambda x: x.cumsum(-1),
    "topk": lambda x: x.topk(3).values,
    "sort": lambda x: x.sort(-1).values,
    "gather": lambda x: x.gather(-1, x.argsort(-1)[..., :2]),
    "scatter": lambda x: torch.zeros_like(x).scatter(-1, x.argsort(-1)[..., :2], 1.0),
    "indexing": lambda x: x[:, [1, 0]],
    "einsum": lambda x: torch.einsum("bct,bdt->bcd", x, x),
    "normalize": lambda x: functional.normalize(x, dim=-1),
    "variance": lambda x: x.var(-1),
    "log sum of exponentials": lambda x: x.logsumexp(-1),
    "masked fill": lambda x: x.masked_fill(x > 0, -1.0),
    "where": lambda x: torch.where(x > 0, x, x * 2),
    "roll": lambda x: x.roll(1, -1),
    "flip": lambda x: x.flip(-1),
    "repeat": lambda x: x.repeat_interleave(2, 1),
    "one hot": lambda x: functional.one_hot(x.argmax(-1), 12).float(),
    "interpolate": lambda x: functional.interpolate(x, scale_factor=2, mode="linear"),
    "grid sample": lambda x: functional.grid_sample(x[:, None], torch.stack([x, x.flip(-1)], -1).tanh()),
    "spectrum": lambda x: torch.fft.rfft(x).abs(),
    "lower triangle": lambda x: x.tril(),
}


class Common(nn.Module):
    """Answers what each layer and each function makes of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([layer for layers in LAYERS.values() for layer in layers.values()])

    def forward(self, tokens, series, image, volume):
        given = dict(zip(NAMES, (tokens, series, image, volume), strict=True))
        inputs = [given[kind] for kind, layers in LAYERS.items() for _ in layers]
        found = [layer(value) for layer, value in zip(self.layers, inputs, strict=True)]
        return [
            *(answer[0] if isinstance(answer, tuple) else answer for answer in found),
            *(function(series) for function in FUNCTIONS.values()),
        ]


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
def test_common_layers_and_functions_are_those_of_pytorch():
    torch.manual_seed(0)
    module = Common().eval()
    shapes = {"tokens": (5, 8), "series": (8, 12), "image": (8, 12, 12), "volume": (4, 6, 6, 6)}
    inputs = [torch.randn(2, *shapes[name]) for name in NAMES]
    batch = torch.export.Dim("batch")
    with shortcuts():
        program = torch.onnx.export(
            module, tuple(inputs), dynamo=True, verbose=False, dynamic_shapes=tuple({0: batch} for _ in NAMES)
        )
    session = onnxruntime.InferenceSession(program.model_proto.SerializeToString())
    with torch.inference_mode():
        expected = module(*inputs)
    read = {value.name: given.numpy() for value, given in zip(session.get_inputs(), inputs, strict=True)}
    names = [*(name for layers in LAYERS.values() for name in layers), *FUNCTIONS]
    found = dict(zip(names, session.run(None, read), strict=True))
    far = {
        name: error
        for name, answer in zip(names, expected, strict=True)
        if not (error := float((torch.from_numpy(found[name]) - answer).abs().max())) <= 1e-4
    }
    assert len(names) >= 56
    assert not far
