"""Named arrays as tensors of the Open Inference Protocol, and back. Needs NumPy, the extra `numpy`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from headway.oip import grpc_predict_v2_pb2 as pb
from headway_client.errors import ProtocolError
from headway_client.results import import_numpy

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

Parameter: TypeAlias = bool | int | float | str
"""A parameter of a call of tensors."""

_BYTES: Final = "BYTES"
_KINDS: Final = {"b": "BOOL", "i": "INT", "u": "UINT", "f": "FP"}
"""Datatypes by the kind of a dtype, which for all but booleans the number of bits follows."""
_LENGTH_BYTES: Final = 4


@dataclass(frozen=True, slots=True)
class TensorAnswer(Mapping[str, "NDArray[Any]"]):
    """Outputs of a model by name: arrays, in which texts are `str`, or `bytes` where they are no UTF-8."""

    outputs: Mapping[str, NDArray[Any]]
    model: str
    """Name of the model that answered."""
    model_version: str

    def __getitem__(self, name: str) -> NDArray[Any]:
        return self.outputs[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.outputs)

    def __len__(self) -> int:
        return len(self.outputs)


def to_request(
    model: str,
    inputs: Mapping[str, ArrayLike],
    *,
    model_version: str,
    outputs: Sequence[str],
    parameters: Mapping[str, Parameter],
) -> pb.ModelInferRequest:
    """Makes a request of arrays.

    Raises:
        ImportError: NumPy is not installed.
        TypeError: An array is of a dtype that the protocol does not have, or a parameter of another type.
    """
    request = pb.ModelInferRequest(model_name=model, model_version=model_version)
    for name, values in inputs.items():
        array = import_numpy().asarray(values)
        datatype = _datatype(name, array)
        request.inputs.add(name=name, datatype=datatype, shape=array.shape)
        request.raw_input_contents.append(_raw_texts(name, array) if datatype == _BYTES else _raw(array))
    for name in outputs:
        request.outputs.add(name=name)
    for name, value in parameters.items():
        kind = next(
            (field for of, field in _PARAMETERS if isinstance(value, of)),
            None,
        )
        if kind is None:
            raise TypeError(f"parameters[{name!r}] is {type(value).__name__}; must be a bool, int, float or str")
        setattr(request.parameters[name], kind, value)
    return request


_PARAMETERS: Final = ((bool, "bool_param"), (int, "int64_param"), (float, "double_param"), (str, "string_param"))


def read_answer(response: pb.ModelInferResponse) -> TensorAnswer:
    """Reads a response to a request of `to_request`.

    Raises:
        ProtocolError: It has other tensors than it says.
    """
    if len(response.outputs) != len(response.raw_output_contents):
        raise ProtocolError("the answer has outputs without their elements")
    pairs = zip(response.outputs, response.raw_output_contents, strict=True)
    arrays = {output.name: _array(output.datatype, raw).reshape(list(output.shape)) for output, raw in pairs}
    return TensorAnswer(arrays, response.model_name, response.model_version)


def _datatype(name: str, array: Any) -> str:
    kind, bits = array.dtype.kind, 8 * array.dtype.itemsize
    if kind in "USO":
        return _BYTES
    if kind not in _KINDS or bits > 64:
        raise TypeError(f"inputs[{name!r}] is of dtype {array.dtype}; must be of booleans, numbers or texts")
    return _KINDS[kind] if kind == "b" else f"{_KINDS[kind]}{bits}"


def _raw(array: Any) -> bytes:
    data: bytes = array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes()
    return data


def _raw_texts(name: str, array: Any) -> bytes:
    parts = []
    for element in array.ravel().tolist():
        if not isinstance(element, (str, bytes)):
            raise TypeError(f"inputs[{name!r}] has an element of {type(element).__name__}; must be str or bytes")
        data = element.encode() if isinstance(element, str) else element
        parts += [len(data).to_bytes(_LENGTH_BYTES, "little"), data]
    return b"".join(parts)


def _array(datatype: str, raw: bytes) -> Any:
    np = import_numpy()
    if datatype == _BYTES:
        texts = list(_texts(raw))
        array = np.empty(len(texts), object)
        array[:] = texts
        return array
    dtype = np.dtype(datatype.lower().replace("fp", "float")).newbyteorder("<")
    return np.frombuffer(raw, dtype).astype(dtype.newbyteorder("="))


def _texts(raw: bytes) -> Iterator[str | bytes]:
    end = 0
    while end < len(raw):
        start = end + _LENGTH_BYTES
        end = start + int.from_bytes(raw[end:start], "little")
        data = raw[start:end]
        try:
            yield data.decode()
        except UnicodeDecodeError:
            yield data
