"""Conversion between tensors of the protocol, typed or raw, and arrays.

N inputs of a call: texts, prompts or images.
"""

from __future__ import annotations

import binascii
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from headway.oip import grpc_predict_v2_pb2 as pb
from headway_server.errors import InvalidInputError
from headway_server.services.open_inference.parameters import BASE64, CONTENT_TYPE, read_hints

Arrays: TypeAlias = Mapping[str, NDArray[Any]]
"""Tensors by name. BYTES tensors have dtype object with elements `bytes`, or `str` for outputs."""

BYTES: Final = "BYTES"
_BF16: Final = "BF16"
_MOST_AXES: Final = 32
_MOST_TEXTS: Final = 2**16
"""Maximum elements of a tensor of BYTES of any shape, each an object in memory."""

_DTYPES: Final[dict[str, np.dtype[Any]]] = {
    "BOOL": np.dtype(np.bool_),
    **{f"UINT{bits}": np.dtype(f"<u{bits // 8}") for bits in (8, 16, 32, 64)},
    **{f"INT{bits}": np.dtype(f"<i{bits // 8}") for bits in (8, 16, 32, 64)},
    "FP16": np.dtype("<f2"),
    "FP32": np.dtype("<f4"),
    "FP64": np.dtype("<f8"),
    _BF16: np.dtype("<u2"),  # the upper half of FP32; NumPy has no BF16
}
"""Memory layout of elements."""

_CONTENTS: Final[dict[str, str]] = {
    "BOOL": "bool_contents",
    **dict.fromkeys(("INT8", "INT16", "INT32"), "int_contents"),
    "INT64": "int64_contents",
    **dict.fromkeys(("UINT8", "UINT16", "UINT32"), "uint_contents"),
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    BYTES: "bytes_contents",
}
"""The field of `InferTensorContents` for a datatype."""

_NAMES: Final[dict[np.dtype[Any], str]] = {
    np.dtype(dtype): name for name, dtype in _DTYPES.items() if name != _BF16
} | {np.dtype(object): BYTES}

_INTEGERS: Final = tuple(name for name in _DTYPES if name.startswith(("INT", "UINT")))
_ACCEPTED: Final[dict[str, tuple[str, ...]]] = {
    **{own: (own, *(name for name in _INTEGERS if name != own)) for own in _INTEGERS},
    "FP16": ("FP16", *_INTEGERS),
    "FP32": ("FP32", "FP16", _BF16, "FP64", *_INTEGERS),
    "FP64": ("FP64", "FP16", _BF16, "FP32", *_INTEGERS),
}
"""Accepted datatypes that are converted to the tensor's own, its own first; whole numbers must keep their values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """An input or output tensor of a task."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    """-1 is an axis of any length. The first is N, or the number of results."""
    is_optional: bool = False
    is_on_request: bool = False
    """True for an output that is returned if it is named, because it is another form of one that is returned."""


def datatype_of(dtype: str) -> str:
    """Returns the datatype of a tensor of a bundle."""
    return BYTES if dtype == "string" else _NAMES[np.dtype(dtype)]


def num_typed_elements(request: pb.ModelInferRequest) -> int:
    """Returns the number of typed elements of a request, which are read one by one."""
    return sum(len(values) for tensor in request.inputs for _, values in tensor.contents.ListFields())


def read_inputs(request: pb.ModelInferRequest, specs: Sequence[TensorSpec], *, max_rows: int | None) -> Arrays:
    """Reads the inputs of a request.

    Args:
        request: The request.
        specs: Input tensors of the model.
        max_rows: Maximum inputs of a call; None: the task checks shapes itself.

    Returns:
        The given tensors by name: BYTES as object arrays (N,), INT64 and FP32 in that dtype and their shape.

    Raises:
        InvalidInputError: A tensor is unknown, is given twice, or has the wrong datatype, shape or number of elements.
    """
    by_name = {spec.name: spec for spec in specs}
    encodings = [read_hints(f"inputs[{index}]", tensor.parameters) for index, tensor in enumerate(request.inputs)]
    raw = request.raw_input_contents
    if raw and len(raw) != len(request.inputs):
        raise InvalidInputError(
            "raw_input_contents",
            f"has {len(raw)} elements for {len(request.inputs)} inputs; send every input raw, or none",
        )
    arrays: dict[str, NDArray[Any]] = {}
    for index, tensor in enumerate(request.inputs):
        field = f"inputs[{index}]"
        spec = by_name.get(tensor.name)
        if spec is None:
            raise InvalidInputError(f"{field}.name", f"is {_quoted(tensor.name)}; the model reads {', '.join(by_name)}")
        if spec.name in arrays:
            raise InvalidInputError(f"{field}.name", f"is {spec.name}, as is that of another input; give each once")
        shape = _check_shape(field, tensor, spec, max_rows)
        if raw and tensor.HasField("contents"):
            raise InvalidInputError(f"{field}.contents", "is set together with raw_input_contents; send one of them")
        given = _read_raw(field, tensor, raw[index]) if raw else _read_typed(field, tensor)
        array = _convert(field, given, spec, tensor.datatype)
        arrays[spec.name] = (_decoded(field, array, encodings[index]) if encodings[index] else array).reshape(shape)
    return arrays


def _decoded(field: str, texts: NDArray[Any], encoding: str) -> NDArray[Any]:
    """Decodes elements of BYTES from one of `ENCODED`."""
    if texts.dtype != object:
        raise InvalidInputError(f"{field}.parameters.{CONTENT_TYPE}", f"is {encoding}, which is for {BYTES} alone")
    try:
        if encoding == BASE64:
            return object_array([binascii.a2b_base64(text, strict_mode=True) for text in texts.ravel()])
        values = ((text, json.loads(text)) for text in texts.ravel())
        return object_array([value.encode() if isinstance(value, str) else text for text, value in values])
    except (ValueError, TypeError, RecursionError) as error:
        raise InvalidInputError(field, f"is not in {encoding} ({error})") from None


def _check_shape(
    field: str, tensor: pb.ModelInferRequest.InferInputTensor, spec: TensorSpec, max_rows: int | None
) -> tuple[int, ...]:
    """Checks datatype and shape, before any element is read; returns the shape as the task reads it."""
    accepted = _ACCEPTED.get(spec.datatype, (spec.datatype,))
    if tensor.datatype not in accepted:
        raise InvalidInputError(
            f"{field}.datatype", f"is {_quoted(tensor.datatype)}; {spec.name} must be {' or '.join(accepted)}"
        )
    shape = tuple(tensor.shape)
    if max_rows is None:
        return _check_any_shape(field, shape, spec)
    if len(shape) == len(spec.shape) + 1 and shape[-1] == 1:  # [N, 1] for [N], the convention of batched text models
        shape = shape[:-1]
    fits = len(shape) == len(spec.shape) and all(
        length >= 0 and expected in (-1, length) for length, expected in zip(shape, spec.shape, strict=True)
    )
    if not fits:
        raise InvalidInputError(
            f"{field}.shape",
            f"is {list(tensor.shape[:8])}; {spec.name} must be {list(spec.shape)}, where -1 is any length",
        )
    _check_num_texts(field, shape, spec)
    if not 1 <= shape[0] <= max_rows:
        raise InvalidInputError(
            f"{field}.shape",
            f"is {list(shape)}; the first axis must be from 1 to {max_rows}; send more in several calls",
        )
    return shape


def _check_any_shape(field: str, shape: tuple[int, ...], spec: TensorSpec) -> tuple[int, ...]:
    """Checks that elements of a shape can be read, whatever the model makes of it."""
    if len(shape) > _MOST_AXES or any(length < 0 for length in shape):
        raise InvalidInputError(f"{field}.shape", f"is {list(shape[:8])}; must be at most {_MOST_AXES} sizes from 0 on")
    _check_num_texts(field, shape, spec)
    return shape


def _check_num_texts(field: str, shape: tuple[int, ...], spec: TensorSpec) -> None:
    if spec.datatype == BYTES and (count := math.prod(shape)) > _MOST_TEXTS:
        raise InvalidInputError(
            f"{field}.shape",
            f"is {list(shape)}, {count} elements of {BYTES}; the limit is {_MOST_TEXTS}; send more in several calls",
        )


def _read_raw(field: str, tensor: pb.ModelInferRequest.InferInputTensor, data: bytes) -> NDArray[Any]:
    """Returns the elements as one row, without a copy if they have a fixed size."""
    count = math.prod(tensor.shape)
    if tensor.datatype == BYTES:
        return object_array(_split_bytes(field, data, count))
    dtype = _DTYPES[tensor.datatype]
    if len(data) != count * dtype.itemsize:
        raise InvalidInputError(
            f"{field}.shape",
            f"is {list(tensor.shape)}, {count * dtype.itemsize} bytes of {tensor.datatype}, and raw_input_contents has "
            f"{len(data)}",
        )
    return np.frombuffer(data, dtype)


def _split_bytes(field: str, data: bytes, count: int) -> list[bytes]:
    """Splits elements of BYTES, each preceded by its length as a little-endian uint32."""
    elements: list[bytes] = []
    start = 0
    for index in range(count):
        end = start + 4
        if end <= len(data):
            start, end = end, end + int.from_bytes(data[start:end], "little")
        if end > len(data):
            raise InvalidInputError(
                f"{field}.shape", f"is of {count} elements, and raw_input_contents ends within element {index}"
            )
        elements.append(data[start:end])
        start = end
    if start != len(data):
        raise InvalidInputError(
            f"{field}.shape",
            f"is of {count} elements, and raw_input_contents has {len(data) - start} bytes behind the last",
        )
    return elements


def _read_typed(field: str, tensor: pb.ModelInferRequest.InferInputTensor) -> NDArray[Any]:
    name = _CONTENTS.get(tensor.datatype)
    if name is None:
        raise InvalidInputError(
            f"{field}.contents", f"has no field for {tensor.datatype}; send it in raw_input_contents"
        )
    count = math.prod(tensor.shape)
    for other, _ in tensor.contents.ListFields():
        if other.name != name:
            raise InvalidInputError(
                f"{field}.contents.{other.name}", f"is set, and elements of {tensor.datatype} are in {name}"
            )
    values = getattr(tensor.contents, name)
    if len(values) != count:
        raise InvalidInputError(
            f"{field}.shape", f"is {list(tensor.shape)}, {count} elements, and contents.{name} has {len(values)}"
        )
    if tensor.datatype == BYTES:
        return object_array(values)
    wide = np.array(values, _DTYPES.get(_wide_name(tensor.datatype)))
    narrow = wide.astype(_DTYPES[tensor.datatype])
    if (narrow != wide).any() and tensor.datatype in _INTEGERS:
        raise InvalidInputError(
            f"{field}.contents.{name}", f"has a value that is out of the range of {tensor.datatype}"
        )
    return narrow


def _wide_name(datatype: str) -> str:
    """Returns the datatype of the field of typed elements."""
    return {"int_contents": "INT32", "uint_contents": "UINT32"}.get(_CONTENTS[datatype], datatype)


def _convert(field: str, given: NDArray[Any], spec: TensorSpec, datatype: str) -> NDArray[Any]:
    """Converts elements of an accepted datatype to the tensor's own."""
    if datatype == spec.datatype:
        return given
    if datatype == _BF16:
        given = (given.astype(np.uint32) << 16).view(np.float32)
    dtype = _DTYPES[spec.datatype]
    if datatype in _INTEGERS and spec.datatype in _INTEGERS and given.size:
        least, most = np.iinfo(dtype).min, np.iinfo(dtype).max
        for value in (int(given.min()), int(given.max())):
            if not least <= value <= most:
                edge = f"at most {most}" if value > most else f"at least {least}"
                raise InvalidInputError(field, f"has {value}; {spec.name} must be {edge}")
    with np.errstate(over="ignore"):  # FP64 past the range of FP32 becomes infinite, which tasks refuse or answer so
        converted = given.astype(dtype)
    if datatype in _INTEGERS and spec.datatype not in _INTEGERS and (changed := converted != given).any():
        value = int(given[changed.argmax()])
        raise InvalidInputError(
            field, f"has {value}, which {spec.datatype} does not hold; send {spec.name} in {spec.datatype}"
        )
    return converted


def decode_texts(name: str, elements: Iterable[bytes]) -> list[str]:
    """Reads elements of BYTES as UTF-8.

    Raises:
        InvalidInputError: An element is not UTF-8.
    """
    texts: list[str] = []
    for element in elements:
        try:
            texts.append(element.decode())
        except UnicodeDecodeError as error:
            raise InvalidInputError(
                f"{name}[{len(texts)}]", f"is not UTF-8 at byte {error.start}; send text as UTF-8"
            ) from None
    return texts


def object_array(elements: Sequence[object]) -> NDArray[Any]:
    """Makes a row of elements of BYTES."""
    array = np.empty(len(elements), object)
    array[:] = elements
    return array


def texts_array(texts: Sequence[Sequence[str]] | Sequence[str]) -> NDArray[Any]:
    """Makes a BYTES tensor (N,) or (N, K) from texts or rows of texts."""
    if not texts or isinstance(texts[0], str):
        return object_array(texts)
    array = np.empty((len(texts), len(texts[0])), object)
    for row, elements in enumerate(texts):
        array[row, :] = elements
    return array


def files_array(files: Sequence[bytes]) -> NDArray[Any]:
    """Makes a BYTES tensor (N,) from files."""
    return object_array(files)


def has_typed_form(array: NDArray[Any]) -> bool:
    """Returns True if there is a field for typed elements of an output; the others are raw in every answer."""
    return _NAMES[array.dtype] in _CONTENTS


def add_output(response: pb.ModelInferResponse, name: str, array: NDArray[Any], *, is_raw: bool) -> None:
    """Adds an output to a response; raw elements go into `raw_output_contents`."""
    datatype = _NAMES[array.dtype]
    output = response.outputs.add(name=name, datatype=datatype, shape=array.shape)
    if datatype != BYTES:
        if is_raw:
            response.raw_output_contents.append(array.tobytes())
        else:
            getattr(output.contents, _CONTENTS[datatype]).extend(array.ravel().tolist())
        return
    elements = [text.encode() if isinstance(text, str) else text for text in array.ravel()]
    if is_raw:
        response.raw_output_contents.append(
            b"".join(part for element in elements for part in (len(element).to_bytes(4, "little"), element))
        )
    else:
        output.contents.bytes_contents.extend(elements)


def _quoted(text: str) -> str:
    """Quotes a caller's text, shortened."""
    return repr(text if len(text) <= 64 else text[:64] + "…")
