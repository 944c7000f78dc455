"""Tiny VITS of `transformers` with random weights, in folders as they are published."""

import json
from pathlib import Path

import torch
import transformers

LETTERS = "k abcdefghijlmnopqrstuvwxyz'-"
"""The first is the blank, which is the padding too, as in MMS-TTS."""
SIZES = {
    "vocab_size": len(LETTERS),
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "window_size": 3,
    "ffn_dim": 24,
    "flow_size": 8,
    "spectrogram_bins": 9,
    "upsample_initial_channel": 16,
    "upsample_rates": [4, 2],
    "upsample_kernel_sizes": [8, 4],
    "resblock_kernel_sizes": [3, 5],
    "resblock_dilation_sizes": [[1, 3], [1, 2]],
    "duration_predictor_num_flows": 2,
    "duration_predictor_filter_channels": 12,
    "prior_encoder_num_flows": 2,
    "prior_encoder_num_wavenet_layers": 2,
    "posterior_encoder_num_wavenet_layers": 1,
    "wavenet_dilation_rate": 2,
    "depth_separable_num_layers": 2,
}


def write_vits(folder: Path, seed: int = 5, pad: str = "k", **changes) -> Path:
    """Writes a folder whose tokens last some frames each."""
    torch.manual_seed(seed)
    model = transformers.VitsModel(transformers.VitsConfig(**{**SIZES, **changes})).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "flows" in name or "duration" in name:
                parameter.add_(0.1 * torch.randn_like(parameter))
            if name.endswith("duration_predictor.flows.0.translate"):
                parameter.fill_(2.0)  # durations of a few frames
            if "decoder.conv_post" in name:
                parameter.mul_(0.03)  # samples that are not clipped
    model.save_pretrained(folder)
    (folder / "vocab.json").write_text(json.dumps({letter: index for index, letter in enumerate(LETTERS)}))
    options = {"phonemize": False, "pad_token": pad, "unk_token": "<unk>", "language": "eng"}
    transformers.VitsTokenizer(str(folder / "vocab.json"), **options).save_pretrained(folder)
    return folder
