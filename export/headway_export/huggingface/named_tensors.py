"""Models of `transformers` by their tensors: whatever one call computes, of heads that no task here reads, too.

Inputs are those that the family's `forward` names and this module knows how to draw, or those of a file of examples.
"""

from __future__ import annotations

import inspect
from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, TypeAlias

import numpy as np
import torch
import transformers
from numpy.random import Generator
from numpy.typing import NDArray
from torch import Tensor, nn

from headway_export.errors import SourceError
from headway_export.huggingface.folder import ModelFolder, without_parametrizations
from headway_export.onnx_file import examples_file, read_arrays
from headway_export.source import ExportSource
from headway_export.tensors import ROW_COUNTS
from headway_export.torch_module import Axes, NamedModule
from headway_export.tracing import make_spec
from headway_server.batching import Tensors
from headway_server.bundles import BATCH_AXIS, EXAMPLES_FILE, Precision
from headway_server.tasks.tensors.graph import resized
from headway_training import folders

LENGTH: Final = "length"
"""Axis of the tokens of a text, or of the moments of an episode."""
_SIZES: Final = {
    BATCH_AXIS: max(ROW_COUNTS),
    LENGTH: 12,
    "choices": 3,
    "decoder_length": 5,
    "regions": 7,
    "samples": 16_000,
    "time": 128,
}
"""Drawn sizes of axes that are dynamic; any other axis is fixed, unless a user names it."""
_NAMED_SIZE: Final = 4
"""Drawn size of an axis that a user has named."""
_MOST_COORDINATE: Final = 1000
"""Boxes of a page are in thousandths of its sides."""
_SEED: Final = 0

_Shape: TypeAlias = tuple[int, ...]
_Draw: TypeAlias = Callable[[_Shape, Any, Generator], NDArray[Any]]
"""Draws an array of a shape, by a configuration."""


def _normal(shape: _Shape, _: Any, random: Generator) -> NDArray[Any]:
    return random.standard_normal(shape).astype(np.float32)


def _ones(dtype: type[np.generic]) -> _Draw:
    return lambda shape, _, __: np.ones(shape, dtype)


def _tokens(shape: _Shape, config: Any, random: Generator) -> NDArray[Any]:
    return random.choice(np.array(folders.ordinary_tokens(config), np.int64), shape)


def _below(name: str) -> _Draw:
    """Draws whole numbers below one that the configuration states."""
    return lambda shape, config, random: random.integers(0, getattr(config, name), shape)


def _boxes(shape: _Shape, _: Any, random: Generator) -> NDArray[Any]:
    corners = random.integers(0, _MOST_COORDINATE + 1, (*shape[:-1], 2, 2))
    return np.sort(corners, axis=-2).reshape(shape)


def _moments(shape: _Shape, config: Any, _: Generator) -> NDArray[Any]:
    return np.broadcast_to(np.arange(shape[1]) % config.max_ep_len, shape).copy()


@dataclass(frozen=True, slots=True)
class _Input:
    """An input that is known by its name."""

    axes: Axes
    """Dynamic ones, fixed numbers, and sizes that the configuration states by name."""
    draw: _Draw = _normal
    is_read: Callable[[Any], bool] = lambda _: True
    """True if a model of a configuration is given it in every call."""


_INPUTS: Final[Mapping[str, _Input]] = {
    "input_ids": _Input((BATCH_AXIS, LENGTH), _tokens),
    "attention_mask": _Input((BATCH_AXIS, LENGTH), _ones(np.int64)),
    "token_type_ids": _Input(
        (BATCH_AXIS, LENGTH), _below("type_vocab_size"), lambda config: getattr(config, "type_vocab_size", 0) > 1
    ),
    "bbox": _Input((BATCH_AXIS, LENGTH, 4), _boxes),
    "xpath_tags_seq": _Input((BATCH_AXIS, LENGTH, "max_depth"), _below("max_xpath_tag_unit_embeddings")),
    "xpath_subs_seq": _Input((BATCH_AXIS, LENGTH, "max_depth"), _below("max_xpath_subs_unit_embeddings")),
    "decoder_input_ids": _Input((BATCH_AXIS, "decoder_length"), _tokens, lambda config: config.is_encoder_decoder),
    "pixel_values": _Input(
        (BATCH_AXIS, "num_channels", "height", "width"),
        is_read=lambda config: getattr(config, "visual_embed", True),  # LayoutLMv3 without an image
    ),
    "visual_embeds": _Input((BATCH_AXIS, "regions", "visual_embedding_dim")),
    "visual_attention_mask": _Input((BATCH_AXIS, "regions"), _ones(np.int64)),
    "visual_token_type_ids": _Input((BATCH_AXIS, "regions"), _ones(np.int64)),
    "input_values": _Input((BATCH_AXIS, "samples")),
    "input_features": _Input((BATCH_AXIS, "time", "num_mel_bins")),
    "past_values": _Input((BATCH_AXIS, "context_length", "num_input_channels")),
    "past_observed_mask": _Input((BATCH_AXIS, "context_length", "num_input_channels"), _ones(np.float32)),
    "observed_mask": _Input((BATCH_AXIS, "context_length", "num_input_channels"), _ones(np.float32)),
    "states": _Input((BATCH_AXIS, LENGTH, "state_dim")),
    "actions": _Input((BATCH_AXIS, LENGTH, "act_dim")),
    "rewards": _Input((BATCH_AXIS, LENGTH, 1)),
    "returns_to_go": _Input((BATCH_AXIS, LENGTH, 1)),
    "timesteps": _Input((BATCH_AXIS, LENGTH), _moments),
}


class Answering(nn.Module):
    """A model of `transformers` whose outputs are the tensors of its answer, by name.

    Several tensors of one name are numbered: `logits_0`. Nested answers are left out.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **inputs: Tensor) -> dict[str, Tensor]:
        """Computes the outputs."""
        outputs: dict[str, Tensor] = {}
        for name, value in self.model(**inputs, return_dict=True).items():
            if isinstance(value, Tensor):
                outputs[name] = value
            elif isinstance(value, tuple):
                outputs |= {f"{name}_{number}": one for number, one in enumerate(value) if isinstance(one, Tensor)}
        return outputs


def read_named_tensors(folder: ModelFolder) -> tuple[ExportSource, tuple[str, ...]]:
    """Reads a model of any head that answers in one call.

    Raises:
        SourceError: The folder is incomplete, its inputs cannot be drawn, or the model does not run on them.
    """
    if (asked := folder.options.precisions) not in {None, (Precision.FP32,)}:
        raise SourceError(f"--precision {' '.join(asked or ())}: a model of tensors is exported in fp32; leave it out")
    kind = _class_of(folder)

    def load() -> Answering:
        return Answering(without_parametrizations(folder.load(kind))).eval()

    inner, file, stated = load(), folder.options.examples, _stated_axes(folder)
    example = _drawn(folder, inner.model, stated) if file is None else read_arrays(file)
    _check_names(folder, inner.model, example)
    module = NamedModule(inner, example, {name: axes for name, axes in stated.items() if name in example})
    max_sizes = _max_sizes(folder, inner, example, stated)
    try:
        notes = module.find_interface(max_sizes)
    except SourceError as error:
        raise SourceError(f"{folder.path}: {error}") from error
    source = folder.source(inner.model, module, make_reference=lambda: module.again(load()))
    return replace(source, documents={**source.documents, EXAMPLES_FILE: examples_file(module.interface)}), notes


def _class_of(folder: ModelFolder) -> Any:
    """Returns the class of `transformers` that the configuration names."""
    names = folder.config.architectures or []
    kind = getattr(transformers, str(names[0]), None) if len(names) == 1 else None
    if kind is None:
        raise SourceError(f"{folder.path}: its architectures are {list(names)}, which is no model of transformers")
    return kind


def _stated_axes(folder: ModelFolder) -> dict[str, Axes]:
    """Returns the axes of the inputs that are known, with the sizes that the configuration states.

    An input is left out where a size of its is not stated.
    """
    sizes = _sizes_of(folder.config)
    found = dict(folder.options.axes)
    chooses = folder.is_of("ForMultipleChoice")
    for name, known in _INPUTS.items():
        axes = tuple(sizes.get(axis, axis) if isinstance(axis, str) else axis for axis in known.axes)
        if chooses and axes[:2] == (BATCH_AXIS, LENGTH):
            axes = (BATCH_AXIS, "choices", *axes[1:])
        if all(isinstance(axis, int) or axis in _SIZES for axis in axes):
            found.setdefault(name, axes)
    return found


def _sizes_of(config: Any) -> dict[str, int]:
    """Returns the fixed sizes that a configuration states, by their names in it."""
    parts = [config, *(part for part in vars(config).values() if isinstance(part, transformers.PreTrainedConfig))]
    sizes = {
        name: value
        for part in reversed(parts)  # its own last
        for name in {axis for known in _INPUTS.values() for axis in known.axes if isinstance(axis, str)}
        if isinstance(value := getattr(part, name, None), int)
    }
    sides = next((value for part in parts if (value := getattr(part, "image_size", None))), None)
    if sides is not None:
        sizes["height"], sizes["width"] = (sides, sides) if isinstance(sides, int) else tuple(sides)
    return {"num_channels": 3, **sizes}


def _drawn(folder: ModelFolder, model: nn.Module, stated: Mapping[str, Axes]) -> Tensors:
    """Draws the inputs that a model reads, of as many rows as a batch has in the comparison of rows.

    Raises:
        SourceError: It reads something that cannot be drawn.
    """
    config, random = folder.config, np.random.default_rng(_SEED)
    parameters = inspect.signature(model.forward).parameters
    names = [name for name in parameters if name in _INPUTS and name in stated and _INPUTS[name].is_read(config)]
    needed = [one.name for one in parameters.values() if one.default is one.empty and one.kind is not one.VAR_KEYWORD]
    if unknown := [name for name in needed if name not in names]:
        raise SourceError(
            f"{folder.path}: {type(model).__name__} reads {', '.join(unknown)}, which cannot be drawn; give a file of "
            "inputs that it runs on with --examples FILE.npz"
        )
    shapes = {
        name: tuple(_SIZES.get(axis, _NAMED_SIZE) if isinstance(axis, str) else axis for axis in stated[name])
        for name in names
    }
    return {name: _INPUTS[name].draw(shape, config, random) for name, shape in shapes.items()}


def _check_names(folder: ModelFolder, model: nn.Module, example: Tensors) -> None:
    parameters = inspect.signature(model.forward).parameters
    for name in example:
        if name not in parameters:
            known = ", ".join(sorted(parameters.keys() - {"kwargs", "self"}))
            raise SourceError(f"--examples: has {name}, and {type(model).__name__} reads {known}")
    for name in folder.options.axes:
        if name not in example:
            raise SourceError(f"--axes {name}: is no input; inputs are {', '.join(example)}")


def _max_sizes(folder: ModelFolder, inner: Answering, example: Tensors, stated: Mapping[str, Axes]) -> dict[str, int]:
    """Returns the most tokens that the model takes: what is asked for or stated, or the most at which it runs.

    Raises:
        SourceError: More are asked for.
    """
    if not (names := [name for name in example if LENGTH in stated.get(name, ())]):
        return {}
    specs = tuple(make_spec(name, array.dtype.name, *stated.get(name, array.shape)) for name, array in example.items())
    rows = resized(specs, example, {BATCH_AXIS: 1})

    def runs(length: int) -> bool:
        at = resized(specs, rows, {LENGTH: length})
        try:
            with torch.inference_mode(), folders.quiet():
                inner(**{name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in at.items()})
        except Exception:  # whatever its code raises
            return False
        return True

    text, asked = folder.config.get_text_config(), folder.options.max_length
    values = (getattr(text, name, None) for name in ("max_position_embeddings", "n_positions", "max_ep_len"))
    most = asked or min((value for value in values if isinstance(value, int) and value > 0), default=folders.MAX_LENGTH)
    if runs(most):
        return {LENGTH: most}
    if asked is not None:
        raise SourceError(f"{folder.path}: --max-length {asked}: the model does not run on so many tokens")
    least = example[names[0]].shape[stated[names[0]].index(LENGTH)]
    return {LENGTH: bisect_left(range(most), True, lo=least + 1, key=lambda length: not runs(length)) - 1}
