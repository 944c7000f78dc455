"""What turns an image into tokens by convolutions, in place of one cut into patches.

B rows, S image size, D model width.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn


class ConvolutionStem(nn.Module):
    """Halves an image's sides by convolutions until a pixel stands for a patch (Hassani et al. 2021, section 3.3).

    A stage is a convolution of 3 x 3, ReLU, and the maximum of 3 x 3 pixels at every second place. Small images teach
    their neighbourhoods to convolutions in fewer passes than to patches.

    Args:
        d_model: Channels of the last stage; every stage before has half of the next.
        patch_size: Pixels a side that a token stands for: 2 to the power of the number of stages.
    """

    def __init__(self, d_model: int, patch_size: int) -> None:
        super().__init__()
        num_stages = patch_size.bit_length() - 1
        widths = [3, *(d_model >> (num_stages - 1 - stage) for stage in range(num_stages))]
        self.convolutions = nn.ModuleList(
            nn.Conv2d(width, following, kernel_size=3, padding=1) for width, following in pairwise(widths)
        )
        self.pool = nn.MaxPool2d(kernel_size=3, stride=2, padding=1)

    def forward(self, pixel_values: Tensor) -> Tensor:
        """Float (B, 3, S, S) -> (B, D, S / patch_size, S / patch_size)."""
        states = pixel_values
        if self.training:  # channels that lie last in memory take a CPU 0.6 of the time, under bf16
            states = states.contiguous(memory_format=torch.channels_last)
        for convolution in self.convolutions:
            states = self.pool(torch.relu(convolution(states)))
        return states

    def initialise(self) -> None:
        """Draws weights for ReLU (He et al. 2015)."""
        for convolution in self.convolutions:
            assert isinstance(convolution, nn.Conv2d)
            nn.init.kaiming_normal_(convolution.weight, nonlinearity="relu")
            assert convolution.bias is not None
            nn.init.zeros_(convolution.bias)
