"""ONNX Runtime: one per process, with one thread pool for all sessions.

Sessions that share a pool do 281 to 293 runs/s where three with pools of their own do 160 to 205 on two cores, because
the threads of one do not push those of another off their cores.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from headway_server.bundles import Bundle, Graph, Manifest, Precision, Task, TensorSpec, Variant
from headway_server.errors import BundleError, RuntimeUnavailableError
from headway_server.runtime.processor import has_exact_int8, usable_cores

Device: TypeAlias = Literal["cpu", "cuda"]
Tensor: TypeAlias = NDArray[Any]

_PROVIDERS: dict[Device, list[str]] = {
    "cpu": ["CPUExecutionProvider"],
    "cuda": ["CUDAExecutionProvider", "CPUExecutionProvider"],
}
_PREFERENCE: dict[Device, tuple[Precision, ...]] = {
    "cpu": (Precision.INT8, Precision.FP32, Precision.FP16),
    "cuda": (Precision.FP16, Precision.FP32),
}
_DTYPES = {
    "tensor(float)": "float32",
    "tensor(float16)": "float16",
    "tensor(int64)": "int64",
    "tensor(int32)": "int32",
    "tensor(int8)": "int8",
    "tensor(bool)": "bool",
}

_pool_lock = threading.Lock()
_pool_threads: int | None = None


def _import_onnxruntime() -> Any:
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")  # its builds report to their maker unless told not to
    # Where there are more threads than rows x heads, it splits a row's cached tokens between threads, and an answer
    # would depend on how many neighbours it has. Costs an fp32 cache some speed and an int8 one none (docs/export.md).
    os.environ.setdefault("ORT_GQA_DISABLE_FLASH_ATTENTION", "1")
    try:
        import onnxruntime  # noqa: PLC0415 (an extra: the message below is better than an ImportError)
    except ImportError:
        raise RuntimeUnavailableError(
            "ONNX Runtime is not installed; run: pip install 'headway-server[cpu]', or 'headway-server[gpu]' for CUDA"
        ) from None
    return onnxruntime


def _size_thread_pool(onnxruntime: Any, num_threads: int) -> int:
    """Sizes the process's pool, once: it is made with the first session and cannot change. Returns its size."""
    global _pool_threads  # noqa: PLW0603 (the pool is the process's)
    with _pool_lock:
        if _pool_threads is None:
            onnxruntime.set_global_thread_pool_sizes(intra_op_num_threads=num_threads, inter_op_num_threads=1)
            _pool_threads = num_threads
        return _pool_threads


class Runtime:
    """Opens sessions on one device.

    Attributes:
        device: Where sessions run.
        num_threads: Threads of the process's pool.
    """

    def __init__(self, *, device: Literal["auto", "cpu", "cuda"] = "auto", num_threads: int | None = None) -> None:
        """Finds the device; `auto` takes CUDA where it is.

        Args:
            device: Where sessions shall run.
            num_threads: Threads of the pool; None takes the cores this process may use. A process keeps the number
                that its first runtime was made with.

        Raises:
            RuntimeUnavailableError: ONNX Runtime is not installed, or CUDA was asked for and is not there.
        """
        self._onnxruntime = _import_onnxruntime()
        self.device: Device = _choose_device(self._onnxruntime, device)
        self._was_found = device == "auto"
        self.num_threads = _size_thread_pool(self._onnxruntime, num_threads or usable_cores())
        self.version: str = self._onnxruntime.__version__

    def __repr__(self) -> str:
        return f"Runtime({self.device}, {self.num_threads} threads, ONNX Runtime {self.version})"

    def suiting(self, manifest: Manifest, precision: Precision | None) -> Runtime:
        """Returns the runtime for a bundle.

        That is this one, unless CUDA was found, not asked for, and the bundle has nothing to run there: then one on
        the CPU.
        """
        if not self._was_found or self.device == "cpu":
            return self
        try:
            self.choose_variant(manifest, precision)
        except RuntimeUnavailableError:
            return Runtime(device="cpu", num_threads=self.num_threads)
        return self

    def choose_variant(self, manifest: Manifest, precision: Precision | None) -> tuple[Precision, Variant]:
        """Chooses the variant to run: the one asked for, or the fastest that this device runs well.

        Raises:
            RuntimeUnavailableError: The bundle has none for this device, or not the one asked for.
        """
        have = ", ".join(sorted(manifest.variants))
        where = f"{manifest.name}/{manifest.version}"
        if precision is not None:
            if precision not in manifest.variants:
                raise RuntimeUnavailableError(
                    f"{where}: has no {precision} variant (it has {have}); ask for one of these or export it again"
                )
        else:
            precision = next((p for p in self._preference() if p in manifest.variants), None)
            if precision is None:
                raise RuntimeUnavailableError(
                    f"{where}: has no variant for {self.device} (it has {have}); export it again with "
                    "--precision fp16, or start the server with --device cpu"
                )
        if self.device == "cuda":
            _check_cuda(manifest, precision)
        return precision, manifest.variants[precision]

    def _preference(self) -> tuple[Precision, ...]:
        if self.device == "cpu" and not has_exact_int8():
            return (Precision.FP32, Precision.INT8, Precision.FP16)
        return _PREFERENCE[self.device]

    def open(self, bundle: Bundle, graph: Graph, *, fixed_axes: Mapping[str, int] | None = None) -> Session:
        """Opens a graph of a bundle.

        Args:
            bundle: The bundle.
            graph: One of its graphs.
            fixed_axes: Sizes of dynamic axes, by name, where they are the same in every run: what cannot happen then is
                dropped as the graph is loaded.

        Raises:
            BundleError: ONNX Runtime cannot load it, or its tensors are not those that the manifest declares.
        """
        options = self._onnxruntime.SessionOptions()
        options.use_per_session_threads = False
        options.log_severity_level = 3  # errors; a warning of the graph optimizer is nothing a user can act on
        sizes = fixed_axes or {}
        for axis, size in sizes.items():
            options.add_free_dimension_override_by_name(axis, size)
        file = bundle.file(graph.file)
        try:
            session = self._onnxruntime.InferenceSession(str(file), options, providers=_PROVIDERS[self.device])
        except Exception as error:
            raise BundleError(f"{file}: ONNX Runtime {self.version} cannot load it ({error})") from error
        _check_tensors(file.name, graph.inputs, session.get_inputs(), sizes)
        _check_tensors(file.name, graph.outputs, session.get_outputs(), sizes)
        return Session(session, graph, self.device)


class Session:
    """A loaded graph. Calls may come from several threads."""

    def __init__(self, session: Any, graph: Graph, device: Device) -> None:
        self._session = session
        self._output_names = [output.name for output in graph.outputs]
        self.graph = graph
        self.device: Device = device

    def __repr__(self) -> str:
        return f"Session({self.graph.file}, {self.device})"

    def run(self, feeds: Mapping[str, Tensor], outputs: Sequence[str] | None = None) -> dict[str, Tensor]:
        """Runs the graph and lets other threads run meanwhile.

        Args:
            feeds: Its inputs by name.
            outputs: Names of those that are wanted; None: all.

        Returns:
            The outputs by name.
        """
        names = self._output_names if outputs is None else list(outputs)
        return dict(zip(names, self._session.run(names, feeds), strict=True))

    def new_binding(self) -> Any:
        """Returns an `onnxruntime.IOBinding` of this session, for `run_bound`."""
        return self._session.io_binding()

    def run_bound(self, binding: Any) -> None:
        """Runs the graph on what is bound. Lets other threads run."""
        self._session.run_with_iobinding(binding)


def _choose_device(onnxruntime: Any, device: Literal["auto", "cpu", "cuda"]) -> Device:
    if device == "cpu":
        return "cpu"
    built_with_cuda = "CUDAExecutionProvider" in onnxruntime.get_available_providers()
    if built_with_cuda:
        with contextlib.redirect_stdout(sys.stderr):  # it prints what it cannot load; stdout is the ready line's
            onnxruntime.preload_dlls()
    if built_with_cuda and _has_cuda_device(onnxruntime):
        return "cuda"
    if device == "auto":
        return "cpu"
    reason = (
        "no usable CUDA device was found, or its driver or the CUDA and cuDNN libraries are missing (the log names "
        "those that could not be loaded)"
        if built_with_cuda
        else "the installed ONNX Runtime is built without CUDA; run: pip uninstall onnxruntime && "
        "pip install 'headway-server[gpu]'"
    )
    raise RuntimeUnavailableError(f"--device cuda: {reason}; or start with --device cpu")


def _has_cuda_device(onnxruntime: Any) -> bool:
    """Tells whether a tensor can be placed on the first CUDA device."""
    try:
        onnxruntime.OrtValue.ortvalue_from_shape_and_type([1], np.float32, "cuda", 0)
    except Exception:  # whatever the driver raises, the answer is no
        return False
    return True


def _check_cuda(manifest: Manifest, precision: Precision) -> None:
    decodes = manifest.task in (Task.GENERATION, Task.TRANSLATION)
    if precision is Precision.INT8 or (decodes and precision is Precision.FP32):
        raise RuntimeUnavailableError(
            f"{manifest.name}/{manifest.version}: its {precision} variant does not run on CUDA; export it with "
            "--precision fp16, or start the server with --device cpu"
        )


def _check_tensors(
    file: str, declared: tuple[TensorSpec, ...], found: list[Any], fixed_axes: Mapping[str, int]
) -> None:
    """Checks names, types and fixed axes of a session's tensors against the manifest's."""
    expected = {tensor.name: tensor for tensor in declared}
    if set(expected) != {tensor.name for tensor in found}:
        raise BundleError(
            f"{file}: has tensors {sorted(tensor.name for tensor in found)}, the manifest declares {sorted(expected)}"
        )
    for tensor in found:
        spec = expected[tensor.name]
        if _DTYPES.get(tensor.type) != spec.dtype:
            raise BundleError(f"{file}: {tensor.name} is {tensor.type}, the manifest declares {spec.dtype}")
        fixed = [axis if isinstance(axis, int) else None for axis in tensor.shape]
        wanted = [axis if isinstance(axis, int) else fixed_axes.get(axis) for axis in spec.shape]
        if fixed != wanted:
            raise BundleError(f"{file}: {tensor.name} has shape {tensor.shape}, the manifest declares {spec.shape}")
