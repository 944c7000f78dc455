"""Somebody's ONNX file as a model of tensors: read, tried on inputs, and held against itself without optimizations."""

from __future__ import annotations

import io
import re
import shutil
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, Final

import numpy as np
import onnx
import onnx_ir as ir
from numpy.typing import NDArray

from headway_export.errors import SourceError, reason_of
from headway_export.exporter import EXTERNAL_DATA_THRESHOLD_BYTES
from headway_export.source import ExportSource
from headway_export.tensors import BOUND, ROUNDED_BOUND, Interface, TensorModule, Trial, sizes_of
from headway_export.tracing import TracedGraph, make_spec
from headway_export.weights import save
from headway_server.batching import Tensors
from headway_server.bundles import BATCH_AXIS, EXAMPLES_FILE, NAME, Architecture, Limits, Task, TensorSpec
from headway_server.runtime import TENSOR_TYPES, Runtime
from headway_server.tasks.tensors.graph import batch_axis_of

NO_BATCH: Final = "none"
"""`--batch-axis` of a model whose calls run one by one."""
_LEAVE_OUT: Final = f"leave it out with --batch-axis {NO_BATCH}"
_MOST_BYTES: Final = 2**31 - 1
"""A protocol buffer holds no more."""
_TRIED_SIZES: Final = (16, 32, 64, 224, 256, 640, 8, 128, 1)
"""Sizes of dynamic axes of drawn inputs, tried in turn."""
_NUM_ROWS: Final = 2
_MOST_WHOLE: Final = (1, 127)
"""Largest whole number of drawn inputs, tried in turn: norms of a few equal numbers amplify every rounding."""
_FEW_ELEMENTS: Final = 64
"""An input of whole numbers with fewer elements may be a shape or a count, whose numbers stay small."""
_UNNAMED: Final = ("", "?", "-1", "None")
"""What converters write in place of the name of an axis."""
_WORDS: Final = ("a", "b", "c")
_SEED: Final = 0
_FEW_BYTES: Final = 256
"""Of a weight that the shape of others may depend on."""
_BFLOAT16: Final = "tensor(bfloat16)"
_ROUNDED: Final = frozenset({ir.DataType.FLOAT16, ir.DataType.BFLOAT16, ir.DataType.INT8, ir.DataType.UINT8})
_ROUNDING: Final = frozenset({"QuantizeLinear", "DynamicQuantizeLinear", "MatMulInteger", "ConvInteger"})
_UNKNOWN: Final = re.compile(r"([\w.]*:?\w+)\(-?\d+\) is not a registered function/op|No Op registered for (\w+)")
_OPSET: Final = re.compile(r"Opset (\d+) is under development.*domain (\S+) is till opset (\d+)", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class OnnxOptions:
    """What a user says of a file."""

    name: str | None = None
    """Name of the model in the store; None: the file's."""
    batch_axis: str | None = None
    """The dimension of the batch: names or numbers of axes of the inputs, with commas; `none`; None: found."""
    examples: Path | None = None
    """An .npz with inputs, and outputs that are compared; None: drawn inputs."""
    max_sizes: Mapping[str, int] = field(default_factory=dict)
    """Limits of dynamic axes, by name."""
    description: str = ""
    license_name: str = "not stated"


def source_from_onnx(file: Path, options: OnnxOptions) -> tuple[ExportSource, tuple[str, ...]]:
    """Reads a file of ONNX and tries it.

    Returns:
        The source, and notes for the user.

    Raises:
        SourceError: The file cannot be read or served, or the options do not fit it.
    """
    model = _read(file)
    module = OnnxModule(file, model)
    notes = module.find_interface(options)
    weights = (value.const_value for value in model.graph.initializers.values() if value.const_value is not None)
    producer = " ".join(filter(None, (model.producer_name, model.producer_version))) or "an unknown producer"
    return (
        ExportSource(
            name=options.name or name_of_model(file.stem, str(file)),
            task=Task.TENSORS,
            module=module,
            make_reference=module.again,
            description=options.description or f"{file.name}, an ONNX file of {producer}.",
            license=options.license_name,
            architecture=Architecture(
                kind="onnx",
                parameter_count=sum(weight.size for weight in weights),
                configuration={"file": file.name, "producer": producer},
            ),
            limits=Limits(max_axis_sizes=dict(options.max_sizes)),
            documents={EXAMPLES_FILE: examples_file(module.interface)},
            reference_name="ONNX Runtime without optimizations",
        ),
        notes,
    )


def examples_file(interface: Interface) -> bytes:
    """Writes one row of the example inputs as an .npz."""
    inputs = interface.rows(1) if interface.has_batch_axis else interface.example
    written = io.BytesIO()
    arrays: dict[str, Any] = {
        name: array.astype(np.str_) if array.dtype == object else array for name, array in inputs.items()
    }
    np.savez_compressed(written, **arrays)
    return written.getvalue()


class OnnxModule(TensorModule):
    """A file of ONNX, run as it is written."""

    def __init__(self, file: Path, model: ir.Model, original: OnnxModule | None = None) -> None:
        """Opens the file in ONNX Runtime without optimizations.

        Args:
            file: The file.
            model: The same, read.
            original: What it is the same as; its file is kept as long as this.

        Raises:
            SourceError: ONNX Runtime cannot load it, or an input or output is of a type that cannot be served.
        """
        super().__init__()
        self._file, self._model, self._original = file, model, (original,)  # no part of this module
        if any(_is_small(value) for value in model.graph.initializers.values()):  # which the runtime may not read there
            self._rewrite()
        self._session = _open(self._file)
        narrow = [
            value.name
            for value in (*self._session.get_inputs(), *self._session.get_outputs())
            if value.type == _BFLOAT16
        ]
        if narrow:
            _widen(model)
            self._rewrite()
            self._session = _open(self._file)
        for side, values in (("input", self._session.get_inputs()), ("output", self._session.get_outputs())):
            for value in values:
                if value.type not in TENSOR_TYPES:
                    raise SourceError(
                        f"{file}: its {side} {value.name} is of type {value.type}, which cannot be served"
                    )
        if not self._session.get_inputs():
            raise SourceError(f"{file}: has no inputs, so there is nothing to ask it")

    def _rewrite(self) -> None:
        """Writes the graph to a file that lasts as long as this."""
        folder = mkdtemp()
        weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        self._file = Path(folder) / self._file.name
        for value in self._model.graph.initializers.values():
            _take_small(value)
        save(self._model, self._file, threshold_bytes=EXTERNAL_DATA_THRESHOLD_BYTES)

    def again(self) -> OnnxModule:
        """Returns the same with another session."""
        other = OnnxModule(self._file, self._model, self)
        other.interface = self.interface
        return other

    def answer(self, inputs: Tensors) -> Tensors:
        """Computes the outputs as the file is written."""
        names = [output.name for output in self._session.get_outputs()]
        return dict(zip(names, self._session.run(names, dict(inputs)), strict=True))

    def traced(self) -> TracedGraph:
        """Returns the graph with its axes named."""
        graph = self._model.graph
        self._model.ir_version = max(self._model.ir_version, 4)  # before, initializers had to be inputs
        for value in [value for value in graph.inputs if value.name in graph.initializers]:
            graph.inputs.remove(value)
        for value in (output for node in graph for output in node.outputs):
            value.shape = None  # the runtime infers them; the file's may be of one batch size
        shapes = {spec.name: spec.shape for spec in (*self.interface.inputs, *self.interface.outputs)}
        for value in (*graph.inputs, *graph.outputs):
            value.shape = ir.Shape(shapes[str(value.name)])
        for value in graph.initializers.values():
            _take_small(value)
        return TracedGraph(role="model", model=self._model)

    def find_interface(self, options: OnnxOptions) -> tuple[str, ...]:
        """Finds the axes, by runs on given or drawn inputs; returns notes.

        Raises:
            SourceError: The file does not run on them, or the options do not fit it.
        """
        first: tuple[Interface, str] | None = None
        failure: SourceError | None = None
        choices = tuple(self._inputs(options.batch_axis))
        is_whole = options.examples is None and any("int" in spec.dtype for spec in choices[0])
        for most, inputs in product(_MOST_WHOLE if is_whole else _MOST_WHOLE[:1], choices):
            if first is not None and all(batch_axis_of(spec) is None for spec in inputs):
                continue  # which is tried to find the batch axis alone
            try:
                found = self._try(inputs, options, most)
            except SourceError as error:
                failure = failure or error
                continue
            first = first or found
            if found[0].has_batch_axis:
                first = found
                break
        if first is None:
            assert failure is not None, "inputs were tried"
            raise failure
        self.interface, note = first
        return (note,) if note else ()

    def _try(self, inputs: tuple[TensorSpec, ...], options: OnnxOptions, most: int) -> tuple[Interface, str]:
        """Finds the interface of inputs with these axes, drawn with whole numbers up to `most`, and a note.

        Raises:
            SourceError: As `find_interface`.
        """
        names = [output.name for output in self._session.get_outputs()]
        given = {} if options.examples is None else _read_examples(options.examples, inputs, names)
        example: Tensors = {name: array for name, array in given.items() if name not in names}
        expected = {name: array for name, array in given.items() if name in names}
        if options.examples is None:
            example = self._draw(inputs, options.max_sizes, most)
        else:
            sizes_of(inputs, example)
            try:
                self.answer(example)
            except Exception as error:
                raise SourceError(f"{options.examples}: the graph does not run on it ({reason_of(error)})") from error
        try:
            return Trial(
                run=self.answer,
                inputs=inputs,
                example=example,
                bound=ROUNDED_BOUND if _rounds(self._model) else BOUND,
                fixed={value.name: [_fixed(size) for size in value.shape] for value in self._session.get_outputs()},
                max_sizes=options.max_sizes,
                leave_out=_LEAVE_OUT if options.batch_axis not in {None, NO_BATCH} else None,
            ).find(expected)
        except SourceError as error:
            raise SourceError(f"{self._file}: {error}") from error

    def _inputs(self, batch_axis: str | None) -> Iterator[tuple[TensorSpec, ...]]:
        """Declares the inputs, with each choice of a batch axis in turn."""
        values = self._session.get_inputs()
        shapes = [[_axis(value.name, number, size) for number, size in enumerate(value.shape)] for value in values]
        places = [(index, number) for index, shape in enumerate(shapes) for number, axis in enumerate(shape)]
        free = [place for place in places if isinstance(_at(shapes, place), str)]
        if batch_axis is None:
            choices = _batches(shapes, free, [place for place in free if _is_named(values[place[0]].shape[place[1]])])
        elif batch_axis == NO_BATCH:
            choices = [set()]
        else:
            told = batch_axis.split(",")
            words = {place: {str(_at(shapes, place)), str(place[1])} for place in free}
            choices = [{place for place in free if not words[place].isdisjoint(told)}]
            if unknown := [word for word in told if not any(word in of_place for of_place in words.values())]:
                known = ", ".join(dict.fromkeys(str(_at(shapes, place)) for place in free)) or "none"
                raise SourceError(
                    f"--batch-axis {unknown[0]}: no input of {self._file} has such a dynamic axis; they have {known}"
                )
        for batch in choices:
            chosen = [list(shape) for shape in shapes]
            for place in free:
                name = str(_at(shapes, place))
                _put(chosen, place, BATCH_AXIS if place in batch else f"{name}_axis" if name == BATCH_AXIS else name)
            if twice := [value.name for value, axes in zip(values, chosen, strict=True) if axes.count(BATCH_AXIS) > 1]:
                raise SourceError(
                    f"--batch-axis {batch_axis}: the input {twice[0]} has two such axes; name one of them"
                )
            yield tuple(
                make_spec(value.name, TENSOR_TYPES[value.type], *axes)
                for value, axes in zip(values, chosen, strict=True)
            )

    def _draw(self, inputs: Sequence[TensorSpec], max_sizes: Mapping[str, int], most: int) -> Tensors:
        """Draws inputs that the graph runs on.

        Raises:
            SourceError: There is no such size of its dynamic axes.
        """
        axes = dict.fromkeys(axis for spec in inputs for axis in spec.shape if isinstance(axis, str))
        failure: Exception | None = None
        for size, num_rows in [(size, rows) for rows in (_NUM_ROWS, 1) for size in _TRIED_SIZES]:
            sizes = {axis: min(size, max_sizes.get(axis, size)) for axis in axes} | {BATCH_AXIS: num_rows}
            drawn = draw(inputs, sizes, most)
            try:
                self.answer(drawn)
            except Exception as error:
                failure = failure or error
                continue
            return drawn
        assert failure is not None, "a size was tried"
        raise SourceError(
            f"{self._file}: does not run on drawn inputs ({reason_of(failure)}); give some that it runs on with "
            "--examples FILE.npz"
        ) from failure


def draw(specs: Sequence[TensorSpec], sizes: Mapping[str, int], most: int = 1) -> dict[str, NDArray[Any]]:
    """Draws inputs: normal numbers, whole numbers from 0 to `most`, letters."""
    random = np.random.default_rng(_SEED)
    drawn = {}
    for spec in specs:
        shape = [sizes[axis] if isinstance(axis, str) else axis for axis in spec.shape]
        if spec.dtype == "string":
            drawn[spec.name] = random.choice(_WORDS, shape).astype(object)
        elif spec.dtype.startswith("float"):
            drawn[spec.name] = np.asarray(random.standard_normal(shape)).astype(spec.dtype)
        else:
            end = 1 + (most if "int" in spec.dtype and np.prod(shape) >= _FEW_ELEMENTS else 1)
            drawn[spec.name] = np.asarray(random.integers(0, end, shape)).astype(spec.dtype)
    return drawn


def _batches(
    shapes: Sequence[Sequence[int | str]], free: Sequence[tuple[int, int]], named: Sequence[tuple[int, int]]
) -> list[set[tuple[int, int]]]:
    """Returns which places may be the batch axis, the likelier first: no input has two.

    They are the first axes and those of their one name elsewhere, in inputs whose first axis is fixed; then also such
    inputs' only axis that is free and has no name, as the state of a recurrent graph has it.
    """
    first = {place for place in free if place[1] == 0}
    names = {_at(shapes, place) for place in first if place in named}
    if not first or len(names) > 1:
        return [set()]
    others = [place for place in free if (place[0], 0) not in first]
    alike = {place for place in others if place in named and _at(shapes, place) in names}
    alike = {place for place in alike if sum(place[0] == other[0] for other in alike) == 1}
    lone = {
        place
        for place in others
        if place not in named and not any(place[0] == other[0] and place != other for other in others)
    }
    return [first | alike, *([first | alike | lone] if lone else [])]


def _is_named(size: int | str | None) -> bool:
    return isinstance(size, str) and size not in _UNNAMED


def _axis(name: str, number: int, size: int | str | None) -> int | str:
    fixed = _fixed(size)
    return fixed if fixed is not None else str(size) if _is_named(size) else f"{name}_{number}"


def _fixed(size: int | str | None) -> int | None:
    return size if isinstance(size, int) and size >= 0 else None


def _at(shapes: Sequence[Sequence[int | str]], place: tuple[int, int]) -> int | str:
    return shapes[place[0]][place[1]]


def _put(shapes: Sequence[list[int | str]], place: tuple[int, int], axis: str) -> None:
    shapes[place[0]][place[1]] = axis


def name_of_model(text: str, where: str) -> str:
    """Makes a model's name of a file's or a module's.

    Raises:
        SourceError: Nothing is left of it.
    """
    name = re.sub(r"[^a-z0-9._-]+", "-", text.lower().replace("_", "-")).strip("._-")[:64].strip("._-")
    if not NAME.fullmatch(name):
        raise SourceError(f"{where}: its name is none for a model; give one with --name")
    return name


# Reading


def _read(file: Path) -> ir.Model:
    """Reads a file.

    Raises:
        SourceError: It is no whole ONNX file, or holds what cannot be served.
    """
    if not file.is_file():
        raise SourceError(f"{file}: is no file; give an ONNX file")
    if (size := file.stat().st_size) > _MOST_BYTES:
        raise SourceError(
            f"{file}: has {size} bytes, the limit of an ONNX file is {_MOST_BYTES}; keep its weights in a file of "
            "external data beside it"
        )
    try:
        proto = onnx.load(file, load_external_data=False)
    except OSError:
        raise
    except Exception as error:  # of protocol buffers
        raise SourceError(f"{file}: is not an ONNX file, or is cut off") from error
    if not proto.HasField("graph") or not proto.graph.output:
        raise SourceError(f"{file}: is not an ONNX file, or is cut off: it has no graph with outputs")
    for side, values in (("input", proto.graph.input), ("output", proto.graph.output)):
        for value in values:
            if (kind := value.type.WhichOneof("value")) not in ("tensor_type", None):
                raise SourceError(f"{file}: its {side} {value.name} is {_word(kind)}, not a tensor{_advice(proto)}")
    _check_external(file, proto)
    try:
        return ir.load(file)
    except Exception as error:  # whatever is wrong with it
        raise SourceError(f"{file}: is not an ONNX file as the standard has it ({reason_of(error)})") from error


def _word(kind: str) -> str:
    word = kind.removesuffix("_type").replace("_", " ")
    return f"an {word}" if word[0] in "aeiou" else f"a {word}"


def _advice(proto: onnx.ModelProto) -> str:
    is_zipped = any(node.op_type == "ZipMap" for node in proto.graph.node)
    return "; convert it with options={'zipmap': False}" if is_zipped else "; tensors alone are served"


def _check_external(file: Path, proto: onnx.ModelProto) -> None:
    """Checks that the external data of a file is there, in its folder, and whole."""
    folder = file.resolve().parent
    for tensor in proto.graph.initializer:
        if tensor.data_location != onnx.TensorProto.EXTERNAL:
            continue
        entries = {entry.key: entry.value for entry in tensor.external_data}
        location = entries.get("location", "")
        beside = folder / location
        if not location or not beside.resolve().is_relative_to(folder):
            raise SourceError(f"{file}: the weight {tensor.name} is in {location or 'no file'}, outside of its folder")
        end = int(entries.get("offset", 0)) + int(entries.get("length", 0))
        if not beside.is_file():
            raise SourceError(f"{file}: the weight {tensor.name} is in {location}, which is not beside it")
        if (size := beside.stat().st_size) < end:
            raise SourceError(
                f"{file}: {location} beside it has {size} bytes, and {tensor.name} needs {end}; it is cut"
            )


def _open(file: Path) -> Any:
    """Opens a file in ONNX Runtime without optimizations.

    Raises:
        SourceError: It cannot be loaded.
    """
    try:
        return Runtime(device="cpu").open_file(file)
    except Exception as error:  # those of onnxruntime
        message = str(error)
        if found := _UNKNOWN.search(message):
            operator = found[1] or found[2]
            raise SourceError(
                f"{file}: needs the operator {operator}, which this ONNX Runtime does not have; export it from "
                "operators of the standard"
            ) from error
        if opset := _OPSET.search(message):
            raise SourceError(
                f"{file}: is of opset {opset[1]} of {opset[2]}, and this ONNX Runtime knows those up to {opset[3]}; "
                "export it with an older opset"
            ) from error
        raise SourceError(f"{file}: ONNX Runtime cannot load it ({reason_of(error)})") from error


def read_arrays(file: Path) -> dict[str, NDArray[Any]]:
    """Reads the arrays of `--examples`.

    Raises:
        SourceError: They cannot be read.
    """
    try:
        with np.load(file, allow_pickle=False) as arrays:
            return dict(arrays)
    except (OSError, ValueError, EOFError, AttributeError, TypeError) as error:
        raise SourceError(
            f"--examples {file}: cannot be read as an .npz of arrays ({reason_of(error)}); texts are arrays of str"
        ) from error


def _read_examples(file: Path, inputs: Sequence[TensorSpec], outputs: Sequence[str]) -> dict[str, NDArray[Any]]:
    """Reads inputs, and outputs if there are some, in the types of the graph's inputs.

    Raises:
        SourceError: They cannot be read, or are those of another graph.
    """
    found = read_arrays(file)
    names = [spec.name for spec in inputs]
    if missing := [name for name in names if name not in found]:
        raise SourceError(f"--examples {file}: lacks {missing[0]}; the graph reads {', '.join(names)}")
    if unknown := found.keys() - {*names, *outputs}:
        raise SourceError(
            f"--examples {file}: has {min(unknown)}; the graph reads {', '.join(names)} and writes {', '.join(outputs)}"
        )
    for spec in inputs:
        array = found[spec.name]
        is_text = spec.dtype == "string"
        dtype = np.dtype("O" if is_text else spec.dtype)
        if is_text != (array.dtype.kind == "U") or not np.can_cast(array.dtype, dtype, "same_kind"):
            raise SourceError(f"--examples {file}: {spec.name} is {array.dtype}; the graph reads {spec.dtype}")
        found[spec.name] = array.astype(dtype)
        if array.dtype.kind in "iu" and not np.array_equal(array, found[spec.name]):
            raise SourceError(f"--examples {file}: {spec.name} has values that {spec.dtype} does not hold")
    return {name: array.astype(object) if array.dtype.kind == "U" else array for name, array in found.items()}


# The graph


def _rounds(model: ir.Model) -> bool:
    """Returns True if a graph computes in 16 or 8 bits."""
    weights = (value.const_value for value in model.graph.initializers.values() if value.const_value is not None)
    return any(weight.dtype in _ROUNDED and weight.size > 1 for weight in weights) or any(
        node.op_type in _ROUNDING for node in model.graph
    )


def _is_small(value: ir.Value) -> bool:
    return isinstance(value.const_value, ir.ExternalTensor) and value.const_value.nbytes <= _FEW_BYTES


def _take_small(value: ir.Value) -> None:
    """Reads a weight from its file if it stays within the graph."""
    weight = value.const_value
    if isinstance(weight, ir.ExternalTensor) and weight.nbytes < EXTERNAL_DATA_THRESHOLD_BYTES:
        value.const_value = ir.Tensor(weight.numpy().copy(), dtype=weight.dtype, shape=weight.shape, name=weight.name)


def _widen(model: ir.Model) -> None:
    """Gives inputs and outputs of bfloat16 the type float32, which has all its numbers: NumPy has no bfloat16."""
    graph = model.graph
    for value in [value for value in graph.inputs if value.dtype == ir.DataType.BFLOAT16]:
        narrow = ir.node("Cast", [value], {"to": ir.DataType.BFLOAT16})
        narrow.outputs[0].name, narrow.outputs[0].dtype = f"{value.name}_bfloat16", ir.DataType.BFLOAT16
        for node, index in tuple(value.uses()):
            if node is not narrow:
                node.replace_input_with(index, narrow.outputs[0])
        graph.insert_before(graph[0], narrow)
        value.dtype = ir.DataType.FLOAT
    for index, value in enumerate(graph.outputs):
        if value.dtype != ir.DataType.BFLOAT16:
            continue
        name, shape = value.name, value.shape
        value.name = f"{name}_bfloat16"
        wide = ir.node("Cast", [value], {"to": ir.DataType.FLOAT})
        output = wide.outputs[0]
        output.name, output.dtype, output.shape = name, ir.DataType.FLOAT, shape
        graph.append(wide)
        graph.outputs[index] = output
