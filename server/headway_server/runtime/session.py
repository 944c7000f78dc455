"""Sessions of ONNX Runtime on one device.

On the CPU a graph can be open twice (`cores.py`): with a thread for every core, for a single run, and with the caller's
thread only, for concurrent runs on all cores.
"""

from __future__ import annotations

import contextlib
import copy
import mmap
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self, TypeAlias

import numpy as np
from numpy.typing import NDArray

from headway_server.bundles import Bundle, Graph, Manifest, Precision, TensorSpec, Variant
from headway_server.errors import BundleError, RuntimeUnavailableError
from headway_server.runtime.binding import Binding
from headway_server.runtime.cores import Cores
from headway_server.runtime.machine import Device, give_back_memory, has_exact_int8, usable_cores

Tensor: TypeAlias = NDArray[Any]

_PROVIDERS: dict[Device, list[str]] = {
    "cpu": ["CPUExecutionProvider"],
    "cuda": ["CUDAExecutionProvider", "CPUExecutionProvider"],
}
_PREFERENCE: dict[Device, tuple[Precision, ...]] = {
    "cpu": (Precision.INT8_STATIC, Precision.INT8, Precision.INT4, Precision.FP32, Precision.FP16),
    "cuda": (Precision.FP16, Precision.FP32),
}
TENSOR_TYPES = {
    "tensor(double)": "float64",
    "tensor(float)": "float32",
    "tensor(string)": "string",
    **{
        f"tensor({name})": name
        for name in (
            "float16",
            *(f"{sign}int{bits}" for sign in ("", "u") for bits in (64, 32, 16, 8)),
            "bool",
        )
    },
}
"""Types of tensors in a manifest, by ONNX Runtime's names."""

_SPIN_US = 200
"""How long an idle thread of a session spins before it sleeps. Without spinning a run takes up to 1.5 times as long;
ONNX Runtime's default, much longer, keeps a core from threads that have work (docs/lanes.md)."""


_SLOW_ON_CPU = ["SkipLayerNormFusion"]
"""Optimizers of ONNX Runtime that make graphs slower there: with this one a decoder step of Transformer base takes 5 to
10 % longer (docs/decisions/fixed-scales.md)."""


_COPYING = ["ConstantFolding"]
"""Those that make a second copy of weights: of a table that is also the output projection, a transposed one."""


def _import_onnxruntime() -> Any:
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")  # its builds report their use to their maker by default
    # Flash attention splits a row's cached tokens between threads if there are more threads than rows x heads, and an
    # answer would then depend on its neighbours. Without it an fp32 cache is a little slower (docs/export.md).
    os.environ.setdefault("ORT_GQA_DISABLE_FLASH_ATTENTION", "1")
    try:
        import onnxruntime  # noqa: PLC0415 (an extra: the message below is better than an ImportError)
    except ImportError:
        raise RuntimeUnavailableError(
            "ONNX Runtime is not installed; run: pip install 'headway-server[cpu]', or 'headway-server[gpu]' for CUDA"
        ) from None
    return onnxruntime


def sum_exactly(options: Any) -> None:
    """Sets options of a session so that products of uint8 and int8 are exact on any processor.

    Without the VNNI instructions an x86 processor adds pairs of such products in 16 bits, which overflow. ONNX Runtime
    then takes weights in uint8, whose sums are exact (docs/decisions/int8-without-vnni.md).
    """
    if not has_exact_int8():
        options.add_session_config_entry("session.x64quantprecision", "1")


def _needs_folding(file: Path) -> bool:
    """Returns True for a graph of a variant whose int8 tables must be constants where they are multiplied."""
    return not has_exact_int8() and file.parent.name in (Precision.INT8, Precision.INT8_STATIC, Precision.INT4)


class Runtime:
    """Opens sessions on one device.

    Attributes:
        device: Where sessions run.
        num_threads: Cores used by all runs together.
        num_lanes: Maximum concurrent runs of a model. With more than one, weights are loaded twice.
        lanes_are_set: True if no measurement of a model changes their number.
        cores: Counts the lanes that are busy on them.
    """

    def __init__(
        self,
        *,
        device: Literal["auto", "cpu", "cuda"] = "auto",
        num_threads: int | None = None,
        num_lanes: int | None = 1,
        map_weights: bool = False,
        lay_out_weights: bool = True,
        keep_memory: bool = True,
    ) -> None:
        """Finds the device; `auto` takes CUDA where it is.

        Args:
            device: Where sessions run.
            num_threads: Cores to use; None: the usable cores of this process.
            num_lanes: Maximum concurrent runs of a model; None: one for each core. On CUDA there is one.
            map_weights: True if files of weights do not change while they are used: what is not laid out anew is read
                from them, mapped. False: they are read once, and may be overwritten then.
            lay_out_weights: True if weights of products are laid out anew for speed, in as much memory again.
            keep_memory: True if a session keeps what its largest run took, for those to come. CPU only.

        Raises:
            RuntimeUnavailableError: ONNX Runtime is not installed, or CUDA is requested and not available.
        """
        self._onnxruntime = _import_onnxruntime()
        self.device: Device = _choose_device(self._onnxruntime, device)
        self._was_found = device == "auto"
        self._num_lanes_asked = num_lanes
        self._map_weights = map_weights
        self._lay_out_weights = lay_out_weights
        self._keep_memory = keep_memory
        self._fallback: Runtime | None = None
        self.num_threads = num_threads or usable_cores()
        self.num_lanes = 1 if self.device == "cuda" else min(num_lanes or self.num_threads, self.num_threads)
        self.lanes_are_set = False
        self.cores = Cores(self.num_threads)
        self.version: str = self._onnxruntime.__version__

    def __repr__(self) -> str:
        lanes = f", {self.num_lanes} lanes" if self.num_lanes > 1 else ""
        return f"Runtime({self.device}, {self.num_threads} threads{lanes}, ONNX Runtime {self.version})"

    def suiting(self, manifest: Manifest, precision: Precision | None) -> Runtime:
        """Returns the runtime for a bundle: this one, or one on the CPU.

        The latter if CUDA was found, but not asked for, and the bundle has no variant that runs there.
        """
        if not self._was_found or self.device == "cpu":
            return self
        try:
            self.choose_variant(manifest, precision)
        except RuntimeUnavailableError:
            if self._fallback is None:  # one for all bundles, which share its cores
                self._fallback = Runtime(
                    device="cpu",
                    num_threads=self.num_threads,
                    num_lanes=self._num_lanes_asked,
                    map_weights=self._map_weights,
                    lay_out_weights=self._lay_out_weights,
                    keep_memory=self._keep_memory,
                )
            return self._fallback
        return self

    def with_lanes(self, num_lanes: int | None) -> Self:
        """Returns this runtime with at most `num_lanes` lanes on the same cores; None: the same number."""
        if num_lanes is None or num_lanes >= self.num_lanes:
            return self
        limited = copy.copy(self)
        limited.num_lanes = num_lanes
        return limited

    def with_set_lanes(self, num_lanes: int | None) -> Self:
        """Returns this runtime with a number of lanes that no measurement changes, as `with_lanes`; None: any."""
        if num_lanes is None:
            return self
        limited = copy.copy(self.with_lanes(num_lanes))
        limited.lanes_are_set = True
        return limited

    def choose_variant(self, manifest: Manifest, precision: Precision | None) -> tuple[Precision, Variant]:
        """Chooses the variant to run: the requested one, or the fastest suitable for this device.

        Raises:
            RuntimeUnavailableError: The bundle has no variant for this device, or not the requested one.
        """
        have = ", ".join(sorted(manifest.variants))
        where = f"{manifest.name}/{manifest.version}"
        if precision is not None:
            if precision not in manifest.variants:
                raise RuntimeUnavailableError(
                    f"{where}: has no {precision} variant (it has {have}); ask for one of these or export it again"
                )
        else:
            precision = next((p for p in _PREFERENCE[self.device] if p in manifest.variants), None)
            if precision is None:
                raise RuntimeUnavailableError(
                    f"{where}: has no variant for {self.device} (it has {have}); export it again with "
                    "--precision fp16, or start the server with --device cpu"
                )
        if self.device == "cuda":
            _check_cuda(manifest, precision)
        return precision, manifest.variants[precision]

    def open(
        self, bundle: Bundle, graph: Graph, *, fixed_axes: Mapping[str, int] | None = None, in_lanes: bool = True
    ) -> Session:
        """Opens a graph of a bundle.

        Args:
            bundle: The bundle.
            graph: One of its graphs.
            fixed_axes: Sizes of dynamic axes, by name, that are the same in every run; ONNX Runtime drops what cannot
                happen then.
            in_lanes: True if runs may use one core each; the graph is then opened twice if the runtime has lanes.

        Raises:
            BundleError: ONNX Runtime cannot load it, or its tensors do not match the manifest.
        """
        sizes = fixed_axes or {}
        if not self._keep_memory:
            give_back_memory()  # of sessions that are closed, which this one would come on top of
        threads = [self.num_threads, 1] if in_lanes and self.num_lanes > 1 else [self.num_threads]
        file = bundle.file(graph.file)
        weights = _weights_beside(file)
        sessions = [self._open_session(file, weights, sizes, num_threads) for num_threads in threads]
        if hasattr(mmap, "MADV_DONTNEED"):
            for mapped in weights.values():
                mapped.madvise(mmap.MADV_DONTNEED)  # most of it has been laid out anew, and is not read again
        give_back_memory()
        name = file.name
        _check_tensors(name, graph.inputs, sessions[0].get_inputs(), sizes)
        _check_tensors(name, graph.outputs, sessions[0].get_outputs(), sizes, may_know_more=True)
        return Session(
            *sessions,
            graph=graph,
            device=self.device,
            cores=self.cores,
            num_lanes=self.num_lanes,
            lanes_are_set=self.lanes_are_set,
            weights=tuple(weights.values()) if self._maps_weights else (),
        )

    def open_file(self, file: Path) -> Any:
        """Opens any ONNX file as it is written, without optimizations; returns ONNX Runtime's session.

        Raises:
            Exception: ONNX Runtime cannot load it.
        """
        options = self._onnxruntime.SessionOptions()
        options.intra_op_num_threads = self.num_threads
        options.graph_optimization_level = self._onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        options.log_severity_level = 4
        return self._onnxruntime.InferenceSession(str(file), options, providers=_PROVIDERS["cpu"])

    @property
    def _maps_weights(self) -> bool:
        return self._map_weights and self.device == "cpu"

    def _open_session(
        self, file: Path, weights: Mapping[str, mmap.mmap], sizes: Mapping[str, int], num_threads: int
    ) -> Any:
        options = self._onnxruntime.SessionOptions()
        options.intra_op_num_threads = num_threads
        options.add_session_config_entry("session.intra_op.spin_duration_us", str(_SPIN_US))
        options.log_severity_level = 4  # errors are raised; warnings of the graph optimizer are not actionable
        options.enable_cpu_mem_arena = self._keep_memory
        sum_exactly(options)
        for axis, size in sizes.items():
            options.add_free_dimension_override_by_name(axis, size)
        if self._maps_weights:
            options.add_session_config_entry("session.use_external_initializer_file_buffers_directly", "1")
        disabled = list(_SLOW_ON_CPU) if self.device == "cpu" else []
        if not self._lay_out_weights:
            options.add_session_config_entry("session.disable_prepacking", "1")
            disabled += [] if _needs_folding(file) else _COPYING
        try:
            if weights:
                buffers = list(weights.values())
                options.add_external_initializers_from_files_in_memory(list(weights), buffers, [*map(len, buffers)])
            return self._onnxruntime.InferenceSession(
                str(file), options, providers=_PROVIDERS[self.device], disabled_optimizers=disabled
            )
        except Exception as error:
            raise BundleError(f"{file}: ONNX Runtime {self.version} cannot load it ({error})") from error


class Session:
    """A loaded graph. Calls may come from several threads.

    Attributes:
        graph: The graph.
        device: Where it runs.
        cores: Counts the busy lanes that share the cores.
        num_lanes: Useful number of concurrent runs.
        lanes_are_set: True if no measurement changes it.
    """

    def __init__(
        self,
        *sessions: Any,
        graph: Graph,
        device: Device,
        cores: Cores,
        num_lanes: int = 1,
        lanes_are_set: bool = False,
        weights: Sequence[mmap.mmap] = (),
    ) -> None:
        """Takes the open sessions of a graph.

        Args:
            sessions: `onnxruntime.InferenceSession`: one with all cores and, if there are lanes, one with one core.
            graph: The graph.
            device: Where it runs.
            cores: Decides which session a run takes.
            num_lanes: Maximum concurrent runs, if there are two sessions.
            lanes_are_set: True if no measurement may change their number.
            weights: The mapped files that the sessions read, which must stay as long as they do.
        """
        self._sessions = sessions
        self._weights = weights
        self.cores = cores
        self.num_lanes = num_lanes if len(sessions) > 1 else 1
        self.lanes_are_set = lanes_are_set
        self._output_names = [output.name for output in graph.outputs]
        self.graph = graph
        self.device: Device = device

    def __repr__(self) -> str:
        return f"Session({self.graph.file}, {self.device})"

    def use_one_core(self, num_lanes: int) -> None:
        """Limits every run of a graph opened in lanes to one core, with `num_lanes` concurrent runs.

        To be called before anything is bound to the graph.
        """
        self._sessions = self._sessions[-1:]
        self.num_lanes = num_lanes

    def run(
        self, feeds: Mapping[str, Tensor], outputs: Sequence[str] | None = None, *, on_one_core: bool = False
    ) -> dict[str, Tensor]:
        """Runs the graph. Releases the GIL meanwhile.

        Args:
            feeds: Its inputs by name.
            outputs: Names of the requested outputs; None: all.
            on_one_core: True always uses one core, if the graph was opened in lanes.

        Returns:
            The outputs by name.
        """
        names = self._output_names if outputs is None else list(outputs)
        index = len(self._sessions) - 1 if on_one_core else self._choose()
        return dict(zip(names, self._sessions[index].run(names, feeds), strict=True))

    def new_binding(self) -> Binding:
        """Returns a binding of this graph with nothing bound."""
        return Binding(self._sessions, self._choose)

    def _choose(self) -> int:
        """Returns the index of the session to run now."""
        return int(len(self._sessions) > 1 and self.cores.is_shared)


def _weights_beside(file: Path) -> dict[str, mmap.mmap]:
    """Maps the weight files of a graph's folder, which graphs may share; by name.

    ONNX Runtime gets these mappings instead of file names. It would otherwise map a file for the session's lifetime,
    and truncating the file would then crash the process. It copies a given mapping, unless `map_weights` makes it read
    from it.

    Raises:
        BundleError: One cannot be mapped, as an empty file.
    """
    mapped: dict[str, mmap.mmap] = {}
    for beside in sorted(file.parent.glob("*.onnx.data")):
        try:
            with beside.open("rb") as stream:
                mapped[beside.name] = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise BundleError(f"{beside}: cannot be mapped ({error})") from error
    return mapped


def _choose_device(onnxruntime: Any, device: Literal["auto", "cpu", "cuda"]) -> Device:
    if device == "cpu":
        return "cpu"
    built_with_cuda = "CUDAExecutionProvider" in onnxruntime.get_available_providers()
    if built_with_cuda:
        with contextlib.redirect_stdout(sys.stderr):  # it prints errors to stdout, which is for the ready line
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
    """Returns True if a tensor can be placed on the first CUDA device."""
    try:
        onnxruntime.OrtValue.ortvalue_from_shape_and_type([1], np.float32, "cuda", 0)
    except Exception:  # whatever the driver raises, the answer is no
        return False
    return True


def _check_cuda(manifest: Manifest, precision: Precision) -> None:
    decodes = "decoder" in manifest.variants[precision].graphs
    of_cpu = (Precision.INT8, Precision.INT8_STATIC, Precision.INT4)
    if precision in of_cpu or (decodes and precision is Precision.FP32):
        raise RuntimeUnavailableError(
            f"{manifest.name}/{manifest.version}: its {precision} variant does not run on CUDA; export it with "
            "--precision fp16, or start the server with --device cpu"
        )


def _check_tensors(
    file: str,
    declared: tuple[TensorSpec, ...],
    found: list[Any],
    fixed_axes: Mapping[str, int],
    *,
    may_know_more: bool = False,
) -> None:
    """Checks names, types and fixed axes of a session's tensors against the manifest's.

    With `may_know_more` the session may have found that an axis is fixed which the manifest names.
    """
    expected = {tensor.name: tensor for tensor in declared}
    if set(expected) != {tensor.name for tensor in found}:
        raise BundleError(
            f"{file}: has tensors {sorted(tensor.name for tensor in found)}, the manifest declares {sorted(expected)}"
        )
    for tensor in found:
        spec = expected[tensor.name]
        if TENSOR_TYPES.get(tensor.type) != spec.dtype:
            raise BundleError(f"{file}: {tensor.name} is {tensor.type}, the manifest declares {spec.dtype}")
        fixed = [axis if isinstance(axis, int) else None for axis in tensor.shape]
        wanted = [axis if isinstance(axis, int) else fixed_axes.get(axis) for axis in spec.shape]
        if may_know_more and len(fixed) == len(wanted):
            fixed = [None if size is None else own for own, size in zip(fixed, wanted, strict=True)]
        if fixed != wanted:
            raise BundleError(f"{file}: {tensor.name} has shape {tensor.shape}, the manifest declares {spec.shape}")
