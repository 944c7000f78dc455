"""SAM: cuts out of an image what is pointed at (Kirillov et al. 2023, section 3 and appendix A).

B images, I image size, L positions (patches of an image, row by row), N prompts, Q points of a prompt, D width of the
decoder, S side of a mask in cells, M masks of a prompt: one for prompts of several parts, and three for those of one.
E width of an embedding: D, and the detail of a patch.

An image is embedded once, and prompts of different images are decoded together: each names its image in the bank of
embeddings.

Deviations from the paper: the image encoder is this kit's ViT, trained from scratch, with global attention in every
layer. A linear map and a normalisation bring its states to the decoder's width. Beside these an embedding holds the
detail of each patch, which is added to the image at the masks' resolution (as Ravi et al. 2024 do): convolutions make
maps down to half a patch and back up, with the encoder's states on the way (Lin et al. 2017). A padded point is seen by
no token, where the paper's is a token of its own. Points that are missing add no token. Prompts are drawn, too: the
box, and a Gaussian at each click (as Mahadevan et al. 2018 do), as maps of a mask's size, which are read patch by patch
together with the earlier mask. Output tokens are told what the detail is like there, and cells what is drawn on them
and how much they are like it. The IoU of all masks is learned, not that of the best alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 (torch's own convention)

from headway_training.models.architectures import architecture
from headway_training.models.base import AttentionKind, Model
from headway_training.models.configuration import Configuration, LayerConfig
from headway_training.models.parts.attention import Kernel
from headway_training.models.vit import ImageEncoder, ImageEncoderConfig, ImageStem

NUM_MASKS = 4
"""M: the first mask answers prompts of several parts, the others those of one part."""
PADDING, OUTSIDE, INSIDE, TOP_LEFT, BOTTOM_RIGHT = -1, 0, 1, 2, 3
"""What a point is: none, a place that the mask leaves out or holds, or a corner of the mask's box."""
FOCAL_WEIGHT = 20.0
"""Of the focal loss beside the dice loss (appendix A)."""
_DETAIL_WIDTH = 16
"""Channels of the detail's finest maps; those of half the size have twice as many."""
_DETAIL_BLOCKS = 2
"""Residual convolutions of each of the detail's maps but the finest."""
_REFINING = 2
"""Width between the two maps of a cell by itself, in widths of its detail."""
_DRAWN_MAPS = 4
"""Of a prompt: the earlier mask, the box, clicks inside and clicks outside."""
_LEAST_WEIGHT = 1e-3
"""Added to the weights of a map's mean, which is then 0 where nothing is drawn."""
_SPOT = 0.02
"""Deviation of the spot that a click is drawn as, as a share of the image's side."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentationConfig(Configuration):
    """Shape of the image encoder and of the mask decoder.

    Raises:
        ValueError: a field is out of its range; the message gives the limit and the value.
    """

    image_size: int
    """Height and width of an image, in pixels; a multiple of `patch_size`."""
    patch_size: int
    """Height and width of a patch, in pixels."""
    stem: ImageStem = "strided_convolutions"
    """What turns an image into tokens, as in `ImageEncoderConfig`."""
    image_num_layers: int
    """Layers of the image encoder."""
    image_d_model: int
    """Width of the image encoder."""
    image_num_heads: int
    """Attention heads of the image encoder."""
    image_d_ff: int
    """Inner width of the image encoder's feed-forward networks."""
    image_dropout: float = 0.0
    """Dropout of the image encoder, as in `LayerConfig`."""
    image_num_registers: int = 0
    """Registers of the image encoder, as in `ImageEncoderConfig`."""
    mask_stride: int = 4
    """Pixels a side of a mask's cell: `patch_size` halved once or more."""
    d_detail: int = 16
    """Numbers of a mask's cell that come from its own surroundings in the image."""
    num_layers: int = 2
    """Two-way layers of the decoder."""
    d_model: int
    """Width of the decoder; a multiple of 16 `num_heads`."""
    num_heads: int
    """Attention heads of the decoder."""
    d_ff: int
    """Inner width of the decoder's feed-forward networks."""

    def __post_init__(self) -> None:
        self._check_integers("mask_stride", "d_detail", "num_layers", "d_model", "num_heads", "d_ff")
        for name, make in (("image encoder", self.image_encoder), ("decoder", self.decoder)):
            try:
                make()
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from error
        if self.d_model % (16 * self.num_heads):
            raise ValueError(
                f"d_model must be a multiple of 16 num_heads ({16 * self.num_heads}), and is {self.d_model}"
            )
        if self.mask_stride < 2 or self.mask_stride & (self.mask_stride - 1) or self.num_doublings < 1:
            raise ValueError(
                f"mask_stride is {self.mask_stride}; it must be patch_size ({self.patch_size}) halved once or more, "
                "2 or more, and a power of two"
            )

    @property
    def num_doublings(self) -> int:
        """Times that the sides are doubled from patches to a mask's cells."""
        ratio = self.patch_size // self.mask_stride
        return ratio.bit_length() - 1 if ratio * self.mask_stride == self.patch_size and ratio & (ratio - 1) == 0 else 0

    @property
    def grid_size(self) -> int:
        """Patches along a side of an image."""
        return self.image_size // self.patch_size

    @property
    def mask_size(self) -> int:
        """Cells along a side of a mask."""
        return self.image_size // self.mask_stride

    @property
    def detail_width(self) -> int:
        """Numbers of a patch's detail."""
        return self.d_detail << (2 * self.num_doublings)

    def image_encoder(self) -> ImageEncoderConfig:
        """The image encoder's shape."""
        return ImageEncoderConfig(
            image_size=self.image_size,
            patch_size=self.patch_size,
            pooling="mean",
            stem=self.stem,
            num_layers=self.image_num_layers,
            d_model=self.image_d_model,
            num_heads=self.image_num_heads,
            d_ff=self.image_d_ff,
            dropout=self.image_dropout,
            num_registers=self.image_num_registers,
        )

    def decoder(self) -> LayerConfig:
        """The shape of the decoder's layers."""
        return LayerConfig(d_model=self.d_model, num_heads=self.num_heads, d_ff=self.d_ff)


class ResidualConvolution(nn.Module):
    """A convolution over a cell and its neighbours, added to its input.

    Args:
        width: Channels.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(width, width, kernel_size=3, padding=1)

    def forward(self, maps: Tensor) -> Tensor:
        """(B, width, H, W) -> the same shape."""
        return maps + F.relu(self.convolution(maps))


class Detail(nn.Module):
    """What each cell of a mask looks like: maps (Lin et al. 2017) of two pixels a cell to half a patch."""

    def __init__(self, configuration: SegmentationConfig) -> None:
        super().__init__()
        num_maps = configuration.patch_size.bit_length() - 2  # cells of 2, 4, ... pixels, to half a patch
        finest = configuration.mask_stride.bit_length() - 2
        widths = [_DETAIL_WIDTH << stage for stage in range(num_maps)]
        self.grid_size = configuration.grid_size
        self.down = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(before, width, kernel_size=3, stride=2, padding=1),
                nn.ReLU(),
                *(ResidualConvolution(width) for _ in range(_DETAIL_BLOCKS if stage else 0)),
            )
            for stage, (before, width) in enumerate(pairwise([3, *widths]))
        )
        self.states = nn.Linear(configuration.image_d_model, widths[-1])
        self.narrow = nn.ModuleList(
            nn.Conv2d(widths[stage + 1], widths[stage], kernel_size=1) for stage in range(finest, num_maps - 1)
        )
        self.mix = nn.ModuleList(ResidualConvolution(widths[stage]) for stage in range(finest, num_maps - 1))
        self.output = nn.Conv2d(widths[finest], configuration.d_detail, kernel_size=1)

    def forward(self, pixel_values: Tensor, states: Tensor) -> Tensor:
        """Pixels (B, 3, I, I) and the encoder's states (B, L, W) -> (B, d_detail, S, S)."""
        maps: list[Tensor] = []
        for stage in self.down:
            maps.append(stage(maps[-1] if maps else pixel_values))
        seen = self.states(states).transpose(1, 2).unflatten(2, (self.grid_size, self.grid_size))
        found = maps[-1] + _doubled(seen)
        steps = zip(self.narrow, self.mix, maps[len(maps) - 1 - len(self.mix) : -1], strict=True)
        for narrow, mix, fine in reversed(list(steps)):
            found = mix(_doubled(narrow(found)) + fine)
        detail: Tensor = self.output(found)
        return detail


def _doubled(maps: Tensor) -> Tensor:
    """Makes four cells of each: (B, C, H, W) -> (B, C, 2 H, 2 W)."""
    rows, channels, height, width = maps.shape
    wide = maps[:, :, :, None, :, None].expand(rows, channels, height, 2, width, 2)
    return wide.reshape(rows, channels, 2 * height, 2 * width)


class SegmentationEncoder(ImageEncoder):
    """Embeds images for the mask decoder."""

    def __init__(self, configuration: SegmentationConfig) -> None:
        super().__init__(configuration.image_encoder())
        self.initialise()
        self.segmentation = configuration
        self.neck = nn.Sequential(
            nn.Linear(configuration.image_d_model, configuration.d_model), nn.LayerNorm(configuration.d_model)
        )
        self.detail = Detail(configuration)

    def forward(self, pixel_values: Tensor) -> dict[str, Tensor]:
        """Float (B, 3, I, I), normalised -> `embedding`, float (B, L, E)."""
        states = self.hidden_states(pixel_values)
        detail = self.detail(pixel_values, states)  # (B, d_detail, S, S)
        necked = self.neck(states)  # (B, L, D)
        return {"embedding": torch.cat((necked, self._by_patch(detail).to(necked.dtype)), dim=-1)}

    def _by_patch(self, detail: Tensor) -> Tensor:
        """(B, C, S, S) -> (B, L, cells of a patch x C), the cells in the order that doublings bring them in."""
        cells = _in_order_of_doublings(detail, self.segmentation)  # (B, C, cells)
        return cells.transpose(1, 2).reshape(detail.shape[0], self.segmentation.grid_size**2, -1)


def _in_order_of_doublings(maps: Tensor, configuration: SegmentationConfig) -> Tensor:
    """(B, C, S, S) -> (B, C, cells): patch by patch, then quarter by quarter in each doubling."""
    times = configuration.num_doublings
    split = (configuration.grid_size, *([2] * times))
    apart = maps.reshape(maps.shape[0], maps.shape[1], *split, *split)
    rows, columns = range(2, 3 + times), range(3 + times, 4 + 2 * times)
    return apart.permute(0, 1, *(axis for pair in zip(rows, columns, strict=True) for axis in pair)).flatten(2)


class PromptAttention(nn.Module):
    """Multi-head attention whose queries, keys and values come from three places.

    Args:
        d_model: width of all of them.
        d_inner: width of the heads together.
        num_heads: attention heads.
    """

    def __init__(self, d_model: int, d_inner: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.query, self.key, self.value = (nn.Linear(d_model, d_inner) for _ in range(3))
        self.output = nn.Linear(d_inner, d_model)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, kernel: Kernel, mask: Tensor | None = None) -> Tensor:
        """(N, T, D), (N, S, D), (N, S, D) -> (N, T, D); `mask` is that of a `Kernel`."""
        queries, keys, values = (
            part(tensor).unflatten(-1, (self.num_heads, -1))
            for part, tensor in ((self.query, query), (self.key, key), (self.value, value))
        )
        projected: Tensor = self.output(kernel(queries, keys, values, mask).flatten(2))
        return projected


class TwoWayLayer(nn.Module):
    """Tokens attend to each other and to the image, and the image to the tokens (appendix A)."""

    def __init__(self, configuration: LayerConfig) -> None:
        super().__init__()
        width, heads = configuration.d_model, configuration.num_heads
        self.among_tokens = PromptAttention(width, width, heads)
        self.to_image = PromptAttention(width, width // 2, heads)
        self.feed_forward = nn.Sequential(
            nn.Linear(width, configuration.d_ff), nn.ReLU(), nn.Linear(configuration.d_ff, width)
        )
        self.from_image = PromptAttention(width, width // 2, heads)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(4))

    def forward(
        self, tokens: Tensor, image: Tensor, *, own: Tensor, places: Tensor, visible: Tensor, kernel: Kernel
    ) -> tuple[Tensor, Tensor]:
        """Reads and returns the tokens, (N, T, D), and the image, (N, L, D).

        Args:
            tokens: the output tokens and the prompt's.
            image: the states of the prompt's image.
            own: what the tokens began as, which queries and keys of tokens are reminded of.
            places: where the patches are, (L, D), which queries and keys of the image are reminded of.
            visible: bool (N, 1, 1, T): False at padding.
            kernel: computes attention.
        """
        reminded = tokens + own
        tokens = self.norms[0](tokens + self.among_tokens(reminded, reminded, tokens, kernel, visible))
        tokens = self.norms[1](tokens + self.to_image(tokens + own, image + places, image, kernel))
        tokens = self.norms[2](tokens + self.feed_forward(tokens))
        image = self.norms[3](image + self.from_image(image + places, tokens + own, tokens, kernel, visible))
        return tokens, image


class MaskDecoder(Model):
    """Turns prompts and the embeddings of their images into masks.

    Starts as torch's linear maps do, and its tokens from N(0, 1), as the paper's model does.
    """

    frequencies: Tensor

    def __init__(self, configuration: SegmentationConfig) -> None:
        super().__init__()
        self.configuration = configuration
        width, times = configuration.d_model, configuration.num_doublings
        self.register_buffer("frequencies", torch.randn(2, width // 2))  # of places (Tancik et al. 2020), fixed
        self.point_kinds = nn.Embedding(4, width)
        self.output_tokens = nn.Embedding(1 + NUM_MASKS, width)  # of the IoU, and of each mask
        cells = _DRAWN_MAPS << (2 * times)
        self.looked = nn.Linear(_DRAWN_MAPS * configuration.d_detail, width)
        self.hints = nn.Linear(2 * _DRAWN_MAPS, configuration.d_detail, bias=False)
        self.refine = nn.Sequential(
            nn.Linear(configuration.d_detail, _REFINING * configuration.d_detail),
            nn.ReLU(),
            nn.Linear(_REFINING * configuration.d_detail, configuration.d_detail),
        )
        self.drawn_patches = nn.Sequential(nn.Linear(cells, width // 2), nn.GELU(), nn.Linear(width // 2, width))
        layer = configuration.decoder()
        self.layers = nn.ModuleList(TwoWayLayer(layer) for _ in range(configuration.num_layers))
        self.to_image = PromptAttention(width, width // 2, configuration.num_heads)
        self.norm = nn.LayerNorm(width)
        widths = [width, *(width >> (2 + step) for step in range(times - 1)), configuration.d_detail]
        self.doublings = nn.ModuleList(nn.Linear(one, 4 * following) for one, following in pairwise(widths))
        self.doubling_norms = nn.ModuleList(nn.LayerNorm(one) for one in widths[1:-1])
        self.mask_weights = nn.ModuleList(_perceptron(width, configuration.d_detail) for _ in range(NUM_MASKS))
        self.iou = _perceptron(width, NUM_MASKS)

    def forward(
        self,
        embedding: Tensor,
        points: Tensor,
        point_labels: Tensor,
        *,
        earlier_mask: Tensor | None = None,
        has_earlier_mask: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """Computes the masks of prompts.

        Args:
            embedding: float (N, L, E), that of each prompt's image.
            points: float (N, Q, 2), x and y as shares of the image's width and height, 0 to 1.
            point_labels: int64 (N, Q): 1 inside, 0 outside, 2 and 3 the top left and bottom right corner of a box, and
                -1 padding, which changes nothing.
            earlier_mask: float (N, S, S), the logits of a mask to improve; None: there is none in any row.
            has_earlier_mask: int64 (N,), 1 if there is one; the row of `earlier_mask` is not looked at otherwise. None:
                there is one in every row.

        Returns:
            `masks`, float (N, M, S, S): logits, above 0 in what is cut out. `predicted_iou`, float (N, M), 0 to 1.
        """
        image, detail = torch.split(embedding, [self.configuration.d_model, self.configuration.detail_width], dim=-1)
        drawn = self._draw(points, point_labels, earlier_mask, has_earlier_mask).to(image.dtype)
        image = image + self.drawn_patches(self._by_patch(drawn))
        detail = torch.unflatten(detail, -1, (-1, self.configuration.d_detail)).flatten(1, 2)  # (N, cells, C)
        looked, hints = self._look(drawn, detail)
        tokens, visible = self._read_points(points, point_labels, looked)
        tokens, places = tokens.to(image.dtype), self._grid_places().to(image.dtype)
        own = tokens
        for layer in self.layers:
            tokens, image = layer(tokens, image, own=own, places=places, visible=visible, kernel=self.kernel)
        tokens = self.norm(tokens + self.to_image(tokens + own, image + places, image, self.kernel))
        weights = torch.stack([part(tokens[:, 1 + i]) for i, part in enumerate(self.mask_weights)], dim=-1)  # (N, C, M)
        masks = self._arrange(self._enlarge(image, detail + self.hints(hints)) @ weights)
        return {"masks": masks.float(), "predicted_iou": self.iou(tokens[:, 0]).float().sigmoid()}

    def _read_points(self, points: Tensor, labels: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
        """Output tokens and those of points, (N, T, D), and which are there, (N, 1, 1, T); `seen` is (N, D)."""
        kinds = self.point_kinds(labels.clamp(min=0))  # (N, Q, D)
        outputs = self.output_tokens.weight + seen[:, None]
        tokens = torch.cat((outputs, self._places(points) + kinds), dim=1)
        there = torch.cat((torch.ones_like(outputs[..., 0], dtype=torch.bool), labels != PADDING), dim=1)  # (N, T)
        return tokens, there[:, None, None, :]

    def _draw(
        self, points: Tensor, labels: Tensor, earlier_mask: Tensor | None, has_earlier_mask: Tensor | None
    ) -> Tensor:
        """The prompt as maps, (N, maps, S, S): an earlier mask from -1 to 1, the others from 0."""
        size = self.configuration.mask_size
        starts = torch.arange(size, device=points.device) / size  # (S)
        spots = torch.exp((starts + 0.5 / size - points[..., None]).square() / (-2 * _SPOT**2))  # (N, Q, 2, S)
        across, down = spots.unbind(dim=2)  # (N, Q, S) each
        clicks = [
            down.transpose(1, 2) @ (across * (labels == kind)[..., None].to(across.dtype)) for kind in (INSIDE, OUTSIDE)
        ]
        corners = [
            (points * (labels == kind)[..., None].to(points.dtype)).sum(dim=1)[..., None]
            for kind in (TOP_LEFT, BOTTOM_RIGHT)
        ]  # (N, 2, 1) each; both 0, of an empty box, where there is none
        low, high = (((corner - starts) * size).clamp(0, 1) for corner in corners)
        columns, rows = (high - low).unbind(dim=1)  # (N, S) each: the share of a cell that the box covers
        box = rows[:, :, None] * columns[:, None, :]
        earlier = torch.zeros_like(box) if earlier_mask is None else earlier_mask.tanh().to(box.dtype)
        if has_earlier_mask is not None:
            earlier = earlier.masked_fill(has_earlier_mask[:, None, None] == 0, 0.0)
        return torch.stack((earlier, box, *clicks), dim=1)

    def _by_patch(self, drawn: Tensor) -> Tensor:
        """(N, maps, S, S) -> (N, L, maps x cells of a patch)."""
        grid, side = self.configuration.grid_size, 1 << self.configuration.num_doublings
        apart = drawn.reshape(-1, _DRAWN_MAPS, grid, side, grid, side)
        return apart.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)

    def _look(self, drawn: Tensor, detail: Tensor) -> tuple[Tensor, Tensor]:
        """What the detail is like where the prompt was drawn, and which cells are like that.

        Args:
            drawn: float (N, maps, S, S).
            detail: float (N, cells, C).

        Returns:
            What output tokens are told, (N, D): of the means of the detail, weighted by each map. Of each cell the
            maps, and how near its detail is to each mean, 0 to 1: (N, cells, 2 maps).
        """
        maps = _in_order_of_doublings(drawn, self.configuration)  # (N, maps, cells)
        weights = maps.clamp(min=0).square().square()  # a click's spot is half as wide so
        total = weights.sum(dim=2, keepdim=True)
        means = weights @ detail / (total + _LEAST_WEIGHT)  # (N, maps, C)
        squares = means.square().sum(dim=2, keepdim=True) + detail.square().sum(dim=2)[:, None]
        distances = (squares - 2 * means @ detail.transpose(1, 2)).clamp(min=0)  # (N, maps, cells)
        alike = total / (total + _LEAST_WEIGHT) / (1 + distances)
        return self.looked(means.flatten(1)), torch.cat((maps, alike), dim=1).transpose(1, 2)

    def _places(self, points: Tensor) -> Tensor:
        """Points (..., 2) in shares of the image -> (..., D)."""
        angles = 2 * math.pi * ((2 * points - 1).float() @ self.frequencies.float())
        return torch.cat((angles.sin(), angles.cos()), dim=-1)

    def _grid_places(self) -> Tensor:
        """(L, D): the places of the patches' centres."""
        grid = self.configuration.grid_size
        centres = (torch.arange(grid, device=self.frequencies.device) + 0.5) / grid
        rows, columns = torch.meshgrid(centres, centres, indexing="ij")
        return self._places(torch.stack((columns, rows), dim=-1).flatten(0, 1))

    def _enlarge(self, image: Tensor, detail: Tensor) -> Tensor:
        """(N, L, D), and what is added to the cells, (N, cells, C) -> (N, cells, C): a doubling makes four of each."""
        states, last = image, len(self.doublings) - 1
        for step, doubling in enumerate(self.doublings):
            states = doubling(states).unflatten(-1, (4, -1)).flatten(1, 2)  # (N, 4 times as many, C)
            if step < last:
                states = F.gelu(self.doubling_norms[step](states))
        cells = F.gelu(states + detail)
        refined: Tensor = cells + self.refine(cells)
        return refined

    def _arrange(self, cells: Tensor) -> Tensor:
        """Brings cells, (N, cells, M), from the order of the doublings to rows and columns: (N, M, S, S)."""
        times, grid, size = self.configuration.num_doublings, self.configuration.grid_size, self.configuration.mask_size
        apart = cells.reshape(-1, grid, grid, *([2, 2] * times), NUM_MASKS)
        rows, columns = range(1, 3 + 2 * times, 2), range(2, 3 + 2 * times, 2)
        return apart.permute(0, 3 + 2 * times, *rows, *columns).reshape(-1, NUM_MASKS, size, size)


@architecture("segmenter", SegmentationConfig, "segmentation")
class Segmenter(Model):
    """Cuts out of images what prompts point at."""

    def __init__(self, configuration: SegmentationConfig) -> None:
        super().__init__()
        self.configuration = configuration
        self.mask_size = configuration.mask_size
        self.encoder = SegmentationEncoder(configuration)
        self.decoder = MaskDecoder(configuration)

    def use_attention(self, kind: AttentionKind) -> Self:
        """Chooses the kernel of both parts, as `Model.use_attention` does."""
        self.encoder.use_attention(kind)
        self.decoder.use_attention(kind)
        return super().use_attention(kind)

    def embed(self, pixel_values: Tensor) -> Tensor:
        """Float (B, 3, I, I), normalised -> embeddings, (B, L, E)."""
        embedding: Tensor = self.encoder(pixel_values)["embedding"]
        return embedding

    def decode(
        self,
        embedding: Tensor,
        points: Tensor,
        point_labels: Tensor,
        *,
        earlier_mask: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Masks and their predicted IoU, as `MaskDecoder.forward` gives them."""
        outputs = self.decoder(embedding, points, point_labels, earlier_mask=earlier_mask)
        return outputs["masks"], outputs["predicted_iou"]

    def forward(
        self, pixel_values: Tensor, image_index: Tensor, points: Tensor, point_labels: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Masks and predicted IoU of prompts without an earlier mask; `image_index` (N,) has the image of each."""
        return self.decode(self.embed(pixel_values).index_select(0, image_index), points, point_labels)


def mask_losses(logits: Tensor, coverage: Tensor) -> Tensor:
    """Focal loss (Lin et al. 2017), 20 times, and dice loss (Milletari et al. 2016) of each mask.

    Both are least where the probability of a cell is the share of it that the mask covers.

    Args:
        logits: float (..., S, S).
        coverage: float, broadcastable to them: the share of each cell that belongs to the mask, 0 to 1.

    Returns:
        (...).
    """
    probability = logits.sigmoid()
    coverage = coverage.expand_as(logits)
    cross_entropy = F.binary_cross_entropy_with_logits(logits, coverage, reduction="none")
    focal = (cross_entropy * (coverage - probability).square()).mean(dim=(-2, -1))
    overlap = (probability * coverage).sum(dim=(-2, -1))
    sizes = (probability.square() + coverage.square()).sum(dim=(-2, -1))
    dice = 1 - (2 * overlap + 1) / (sizes + 1)
    return FOCAL_WEIGHT * focal + dice


def mask_iou(masks: Tensor, truth: Tensor) -> Tensor:
    """Intersection over union of masks, bool (..., H, W) each; 0 where both are empty."""
    both = (masks & truth).sum(dim=(-2, -1))
    either = (masks | truth).sum(dim=(-2, -1))
    return both / either.clamp(min=1)


def _perceptron(d_input: int, d_output: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(d_input, d_input), nn.ReLU(), nn.Linear(d_input, d_input), nn.ReLU(), nn.Linear(d_input, d_output)
    )
