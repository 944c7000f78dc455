"""Pictures of attention, drawn by matplotlib (the extra `pictures`).

R rows, C columns of a map.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headway_client.results import (
    Attention,
    AttentionMap,
    ImageCaption,
    ImageInspection,
    InspectedToken,
    TextInspection,
    TranslationInspection,
)

if TYPE_CHECKING:  # extras
    from matplotlib.figure import Figure
    from PIL import Image

_COLOURS = "Blues"
_OVERLAY = "inferno"
_MAX_LABELS = 48
"""Most token labels along a map."""
_MAX_SMALL_LABELS = 12
"""Most token labels along each of several maps."""
_INCHES_OF_TOKEN = 0.24
_SMALL_MAP_INCHES = 1.9
_MOST_MAPS = 400
"""Most maps of a picture; more would be illegible."""
_DPI = 150


def save(
    inspection: TextInspection | TranslationInspection | ImageInspection | ImageCaption,
    file: Path | str,
    *,
    image: bytes | Path | str | None = None,
) -> None:
    """Draws the maps of an inspection: one as a heatmap token by token, several as small multiples.

    An image's maps are laid over it: the attention of its class token, or without one of all patches together. A
    caption's show the attention of each word.

    Args:
        inspection: Result to draw.
        file: Output file; its suffix chooses the format, such as .png or .svg.
        image: The inspected or captioned image, encoded or by path.

    Raises:
        ImportError: The extra `pictures` is not installed.
        ValueError: The format is unknown, there is nothing to draw, or there are too many maps.
        OSError: The image cannot be read, or the file cannot be written.
    """
    try:
        import matplotlib as mpl  # noqa: PLC0415 (an extra)
    except ImportError as error:
        raise ImportError(f"{error}; run: pip install 'headway-client[pictures]'") from None
    path = Path(file)
    known = _new_figure(1, 1).canvas.get_supported_filetypes()
    if path.suffix.removeprefix(".") not in known:
        raise ValueError(f"{path}: is of no known format; end its name in one of {', '.join(sorted(known))}")
    with mpl.rc_context({"svg.hashsalt": "headway", "svg.fonttype": "none", "font.size": 8}):
        figure = _drawn(inspection, image)
        svg = {"metadata": {"Date": None}} if path.suffix == ".svg" else {}
        figure.savefig(path, dpi=_DPI, bbox_inches="tight", **svg)  # type: ignore[arg-type]


def _new_figure(width: float, height: float) -> Figure:
    """Makes a figure of this size in inches."""
    from matplotlib.figure import Figure  # noqa: PLC0415 (an extra)

    return Figure(figsize=(width, height), layout="constrained")


def _drawn(
    inspection: TextInspection | TranslationInspection | ImageInspection | ImageCaption,
    image: bytes | Path | str | None,
) -> Figure:
    if isinstance(inspection, ImageInspection):
        if image is None:
            raise ValueError("the picture of an image's inspection needs the image")
        return _draw_image(inspection, image)
    if isinstance(inspection, ImageCaption):
        if image is None:
            raise ValueError("the picture of a caption needs the image")
        return _draw_caption(inspection, image)
    if isinstance(inspection, TextInspection):
        names = _names(inspection.tokens)
        parts = [("", inspection.attention, names, names)]
    else:
        sources, targets = _names(inspection.source_tokens), _names(inspection.target_tokens)
        parts = [
            ("encoder", inspection.encoder_attention, sources, sources),
            ("decoder", inspection.decoder_attention, targets, targets),
            ("cross", inspection.cross_attention, targets, sources),
        ]
    parts = [part for part in parts if part[1].maps]
    _check_count(sum(len(part[1].maps) for part in parts))
    sizes = [_size_of(attention) for _, attention, _, _ in parts]
    figure = _new_figure(max(width for width, _ in sizes), sum(height for _, height in sizes))
    sections = figure.subfigures(len(parts), 1, height_ratios=[height for _, height in sizes], squeeze=False)
    for section, (kind, attention, rows, columns) in zip(sections[:, 0], parts, strict=True):
        _draw_maps(section, attention, rows, columns, kind)
    return figure


def _size_of(attention: Attention) -> tuple[float, float]:
    """Returns the size of one map in inches."""
    if len(attention.maps) == 1:
        longest = [min(count, 4 * _MAX_LABELS) for count in (attention.column_count, attention.row_count)]
        return tuple(1.5 + max(1.5, _INCHES_OF_TOKEN * count) for count in longest)  # type: ignore[return-value]
    across, down = _grid_of(attention.maps)
    return _SMALL_MAP_INCHES * across, _SMALL_MAP_INCHES * down + 0.3


def _grid_of(maps: Sequence[AttentionMap]) -> tuple[int, int]:
    """Returns the columns and rows of the grid: a row for each layer with several maps."""
    layers = len({found.layer for found in maps})
    if layers == len(maps):
        across = min(4, len(maps))
        return across, -(-len(maps) // across)
    return max(sum(found.layer == layer for found in maps) for layer in {found.layer for found in maps}), layers


def _draw_maps(section: Any, attention: Attention, rows: Sequence[str], columns: Sequence[str], kind: str) -> None:
    """Draws the maps of one kind of attention."""
    across, down = (1, 1) if len(attention.maps) == 1 else _grid_of(attention.maps)
    axes = section.subplots(down, across, squeeze=False)
    weights = attention.to_numpy()  # (maps, R, C)
    for index, found, axis in _placed(attention.maps, axes):
        drawn = axis.imshow(weights[index], cmap=_COLOURS, vmin=0.0, vmax=1.0 if len(weights) > 1 else None)
        axis.set_title(f"{kind}, {found.title}" if kind else found.title, fontsize=8)
        axis.set_xticks([])
        axis.set_yticks([])
        if len(attention.maps) == 1:
            _name_tokens(axis, rows, columns, _MAX_LABELS)
            axis.set_xlabel("is attended to")
            axis.set_ylabel("attends")
            section.colorbar(drawn, ax=axis, shrink=0.6)
        else:  # along the edges alone
            subplot = axis.get_subplotspec()
            _name_tokens(
                axis,
                rows if subplot.is_first_col() else (),
                columns if subplot.is_last_row() else (),
                _MAX_SMALL_LABELS,
            )


def _placed(maps: Sequence[AttentionMap], axes: Any) -> list[tuple[int, AttentionMap, Any]]:
    """Assigns axes to the maps: layers below each other, heads side by side. Unused axes are removed."""
    down, across = axes.shape
    placed, taken = [], set()
    rows = {layer: row for row, layer in enumerate(dict.fromkeys(found.layer for found in maps))}
    by_layer = len(rows) == down and len(maps) > down
    in_row = dict.fromkeys(rows, 0)
    for index, found in enumerate(maps):
        row, column = (rows[found.layer], in_row[found.layer]) if by_layer else divmod(index, across)
        in_row[found.layer] += 1
        taken.add((row, column))
        placed.append((index, found, axes[row, column]))
    for row, column in product(range(down), range(across)):
        if (row, column) not in taken:
            axes[row, column].remove()
    return placed


def _name_tokens(axis: Any, rows: Sequence[str], columns: Sequence[str], most: int) -> None:
    """Labels the tokens along a map, if there are at most `most`."""
    if len(columns) <= most:
        axis.set_xticks(range(len(columns)), columns, rotation=90)
    if len(rows) <= most:
        axis.set_yticks(range(len(rows)), rows)


def _open(image: bytes | Path | str, size: tuple[int, int]) -> Image.Image:
    """Opens an image, turns it upright and checks its width and height."""
    from PIL import Image, ImageOps  # noqa: PLC0415 (an extra)

    with Image.open(io.BytesIO(image) if isinstance(image, bytes) else image) as opened:
        picture = ImageOps.exif_transpose(opened).convert("RGB")
    if picture.size != size:
        raise ValueError(
            f"the image has {picture.width} x {picture.height} pixels, and {size[0]} x {size[1]} were inspected; give "
            "the same one"
        )
    return picture


def _draw_caption(caption: ImageCaption, image: bytes | Path | str) -> Figure:
    """Draws the attention of each caption word beside the image (Xu et al. 2015, figure 1)."""
    picture = _open(image, (caption.width, caption.height))
    maps = caption.word_maps()
    _check_count(len(maps))
    part = caption.seen_part
    extent = (part.left, part.right, part.bottom, part.top)
    across = min(6, len(maps) + 1)
    down = -(-(len(maps) + 1) // across)
    height = min(2.5, max(0.4, picture.height / picture.width))
    figure = _new_figure(_SMALL_MAP_INCHES * across, (_SMALL_MAP_INCHES * height + 0.3) * down)
    for index, axis in enumerate(figure.subplots(down, across, squeeze=False).flat):
        if index > len(maps):
            axis.remove()
            continue
        axis.imshow(picture, extent=(0, picture.width, picture.height, 0))
        if index:
            found = maps[index - 1]
            axis.imshow(found.attention, cmap=_OVERLAY, alpha=0.55, extent=extent, vmin=0.0, interpolation="nearest")
            axis.set_title(found.word.of(caption.text).replace("$", r"\$"), fontsize=8)
        axis.set_xlim(0, picture.width)
        axis.set_ylim(picture.height, 0)
        axis.set_axis_off()
    return figure


def _draw_image(inspection: ImageInspection, image: bytes | Path | str) -> Figure:
    picture = _open(image, (inspection.width, inspection.height))
    maps = inspection.attention.maps
    _check_count(len(maps))
    shape = (inspection.patch_row_count, inspection.patch_column_count)
    num_before = len(inspection.patches) - shape[0] * shape[1]  # 1 with a class token
    boxes = inspection.patches[num_before:]
    extent = (boxes[0].left, boxes[-1].right, boxes[-1].bottom, boxes[0].top)
    weights = inspection.attention.to_numpy()  # (maps, R, C)
    across, down = _grid_of(maps) if len(maps) > 1 else (1, 1)
    inches = _SMALL_MAP_INCHES if len(maps) > 1 else 4.0
    height = min(2.5, max(0.4, picture.height / picture.width))
    figure = _new_figure(inches * across, (inches * height + 0.3) * down)
    axes = figure.subplots(down, across, squeeze=False)
    for index, found, axis in _placed(maps, axes):
        rows = weights[index]
        attended = rows[0, 1:] if num_before else rows.mean(axis=0)  # of the class token, or of all patches
        axis.imshow(picture, extent=(0, picture.width, picture.height, 0))
        axis.imshow(
            attended.reshape(shape), cmap=_OVERLAY, alpha=0.55, extent=extent, vmin=0.0, interpolation="nearest"
        )
        axis.set_xlim(0, picture.width)
        axis.set_ylim(picture.height, 0)
        axis.set_title(found.title, fontsize=8)
        axis.set_axis_off()
    return figure


def _check_count(count: int) -> None:
    if not 1 <= count <= _MOST_MAPS:
        raise ValueError(
            f"there are {count} maps to draw, a picture shows 1 to {_MOST_MAPS}; ask for other layers or heads, or for "
            "a summary"
        )


def _names(tokens: Sequence[InspectedToken]) -> list[str]:
    # A dollar sign would begin a formula.
    return [token.text.strip().replace("$", r"\$") or repr(token.text) for token in tokens]
