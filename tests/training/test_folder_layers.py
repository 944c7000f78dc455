"""A configuration is held to the weights beside it before layers are made."""

from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from headway_training.errors import CheckpointError
from headway_training.folders import check_layers


def test_layers_that_no_weights_could_be_of_are_refused_before_they_are_made(tmp_path):
    save_file({f"layers.{number}.weight": torch.ones(2) for number in range(3)}, tmp_path / "model.safetensors")
    for usual in (2, 24, 200, None):
        check_layers(tmp_path, SimpleNamespace(num_hidden_layers=usual))
    with pytest.raises(CheckpointError, match="names 10,000,000 layers, and the folder has 3 weights"):
        check_layers(tmp_path, SimpleNamespace(num_hidden_layers=10_000_000))
    (tmp_path / "model.safetensors").write_bytes(b"damaged")
    check_layers(tmp_path, SimpleNamespace(num_hidden_layers=10_000_000))  # the weights' own error comes later
