"""Where the processor time of a server goes: the measurements behind `python -m benchmarks time-shares`.

    python -m benchmarks.time_shares [profile FOLDER] -- FLAGS   # the server, with a watch on its runs of ONNX Runtime

A watched server answers a line on standard input with the processor seconds that its threads have taken so far, in user
mode and in the kernel, and with those of them that runs of ONNX Runtime took in threads of Python. With `profile` ONNX
Runtime writes how long every operator takes, which slows it down: so operators are measured apart from threads.
"""

import json
import os
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from benchmarks.contestants.headway import Server, running_server
from benchmarks.inputs import Case
from benchmarks.worker import ROOT, Worker
from headway_server.runtime import usable_cores

Times = dict[str, list[float]]
"""By what took them: seconds of processor time in user mode, and in the kernel."""

RUNS, POOL, GRPC, LOOP, WORKERS = "runs", "pool", "grpc", "loop", "workers"
_GRPC_THREADS = ("event_engine", "grpc_", "lifeguard", "default-exec", "resolver-exec", "_poll_wrapper")
_OPERATORS = {
    "products": ("MatMul", "Gemm", "Conv", "DynamicQuantizeMatMul"),
    "attention": ("GroupQueryAttention", "MultiHeadAttention", "Attention", "Softmax"),
    "normalisation": ("LayerNormalization", "SkipLayerNormalization", "SimplifiedLayerNormalization"),
    "ranking": ("TopK", "ArgMax", "ReduceLogSumExp", "LogSoftmax"),
    "moving": ("Reshape", "Transpose", "Gather", "Slice", "Concat", "Split", "Unsqueeze", "Squeeze", "Expand", "Shape",
               "Scatter", "Pad", "Identity", "Where", "Range", "Tile", "Flatten"),
}  # fmt: skip
"""Kinds of operators, by how their names begin; all others work element by element."""
_BUSY = (0.35, 0.65)
"""Of the time of a load, the part in which all callers wait for an answer."""
_HOLDS_OTHERS = ("If", "Loop", "Scan")
"""Operators whose time is that of the graphs in them."""
ELEMENTWISE, BETWEEN = "element by element", "between operators"


def watch() -> None:
    """Has this process answer every line on standard input; to be called before a server starts."""
    import onnxruntime  # noqa: PLC0415 (the driver does without)

    runs: defaultdict[int, list[float]] = defaultdict(lambda: [0.0, 0.0])

    def watched(method: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **options: Any) -> Any:
            before = resource.getrusage(resource.RUSAGE_THREAD)
            try:
                return method(*arguments, **options)
            finally:
                after, taken = resource.getrusage(resource.RUSAGE_THREAD), runs[threading.get_native_id()]
                taken[0] += after.ru_utime - before.ru_utime
                taken[1] += after.ru_stime - before.ru_stime

        return run

    for name in ("run", "run_with_iobinding"):
        setattr(onnxruntime.InferenceSession, name, watched(getattr(onnxruntime.InferenceSession, name)))

    def answer() -> None:
        for _ in sys.stdin:
            sys.stdout.write(json.dumps(_thread_times(runs)) + "\n")
            sys.stdout.flush()

    threading.Thread(target=answer, name="watch", daemon=True).start()


def _thread_times(runs: Mapping[int, list[float]]) -> Times:
    named = {thread.native_id: thread.name for thread in threading.enumerate()}
    times: Times = {kind: [0.0, 0.0] for kind in (RUNS, POOL, GRPC, LOOP, WORKERS)}
    for task in Path("/proc/self/task").iterdir():
        number, stat = int(task.name), (task / "stat").read_text(encoding="ascii", errors="replace")
        user_s, system_s = (int(ticks) / os.sysconf("SC_CLK_TCK") for ticks in stat.rpartition(")")[2].split()[11:13])
        name = named.get(number) or stat[stat.index("(") + 1 : stat.rindex(")")]
        in_runs = runs.get(number, [0.0, 0.0])
        if any(one in name for one in _GRPC_THREADS):
            kind = GRPC
        elif number == os.getpid():
            kind = LOOP
        else:
            kind = WORKERS if number in named else POOL  # its pool's threads are no Python's
        for index, seconds in enumerate((user_s, system_s)):
            times[RUNS][index] += in_runs[index]
            times[kind][index] += seconds - in_runs[index]
    return times


def profile(folder: Path) -> None:
    """Has every session of ONNX Runtime that this process opens write its profile to a folder when a line comes."""
    import onnxruntime  # noqa: PLC0415

    sessions: list[Any] = []
    open_session = onnxruntime.InferenceSession.__init__

    def opened(self: Any, path: str, options: Any, **others: Any) -> None:
        options.enable_profiling = True
        options.profile_file_prefix = str(folder / str(len(sessions)))
        open_session(self, path, options, **others)
        sessions.append(self)

    onnxruntime.InferenceSession.__init__ = opened

    def answer() -> None:
        for _ in sys.stdin:
            begun_ns = [session.get_profiling_start_time_ns() for session in sessions]
            files = [session.end_profiling() for session in sessions]
            sys.stdout.write(json.dumps({"files": dict(zip(files, begun_ns, strict=True))}) + "\n")
            sys.stdout.flush()

    threading.Thread(target=answer, name="watch", daemon=True).start()


def operator_shares(files: Mapping[str, int], seconds: float) -> dict[str, dict[str, float]]:
    """Returns the shares of the time of all runs by kind and by name of operator, of the last `seconds` of profiles."""
    spans: list[tuple[float, str, float]] = []  # end of a node or a run in ms since a common time, its name, its time
    for file, begun_ns in files.items():
        for event in json.loads(Path(file).read_text(encoding="utf-8")):
            is_node = event.get("cat") == "Node" and event["name"].endswith("_kernel_time")
            if is_node or event.get("name") == "model_run":
                name = event["args"]["op_name"] if is_node else BETWEEN
                if name in _HOLDS_OTHERS:
                    continue
                spans.append((begun_ns / 1e6 + (event["ts"] + event["dur"]) / 1e3, name, event["dur"] / 1e3))
    last_ms = max((end_ms for end_ms, _, _ in spans), default=0.0)
    totals: Counter[str] = Counter()
    for end_ms, name, taken_ms in spans:
        if end_ms >= last_ms - seconds * 1e3:
            totals[name] += taken_ms  # type: ignore[assignment]  # a counter counts milliseconds as well
    whole = totals[BETWEEN]
    totals[BETWEEN] = 2 * whole - sum(totals.values())
    kinds: Counter[str] = Counter()
    for name, taken_ms in totals.items():
        begins = (kind for kind, names in _OPERATORS.items() if name.startswith(names))
        kinds[BETWEEN if name == BETWEEN else next(begins, ELEMENTWISE)] += taken_ms
    return {
        title: {name: round(taken_ms / whole, 3) for name, taken_ms in found.most_common() if taken_ms > whole / 200}
        for title, found in (("kinds", kinds), ("operators", totals))
    }


@dataclass(slots=True)
class TimeShares:
    """Measures servers under load, and holds a row for each load."""

    folder: Path
    caller: Worker
    seconds: float
    py_spy: str | None
    rows: list[dict[str, Any]] = field(default_factory=list)

    def measure(self, store: Path, cases: Sequence[Case], callers: Sequence[int], flags: Sequence[str]) -> None:
        """Measures every case with every number of callers: threads and event loop on one server, then operators."""
        files = {case.name: case.write(self.folder) for case in cases}
        loads = [(case.name, count) for case in cases for count in callers]
        with running_server(ROOT, store, flags, ("benchmarks.time_shares", "--")) as server:
            rows = [self._row(server, name, files[name], count) for name, count in loads]
        self.rows += rows
        for row, (name, count) in zip(rows, loads, strict=True):
            profiled = ("benchmarks.time_shares", "profile", str(self.folder), "--")
            with running_server(ROOT, store, flags, profiled) as server:
                self._call(server, files[name], count)
                row.update(operator_shares(server.process.ask()["files"], self.seconds))

    def _call(self, server: Server, file: Path, callers: int) -> dict[str, Any]:
        load = {"case": str(file), "callers": callers, "seconds": self.seconds}
        return self.caller.ask(**load, protocol="headway", address=server.address)

    def _row(self, server: Server, name: str, file: Path, callers: int) -> dict[str, Any]:
        begun_s = time.perf_counter()
        figures = self._call(server, file, callers)  # that met cold memory
        call_s = time.perf_counter() - begun_s
        client = psutil.Process(self.caller.process_id)
        with ThreadPoolExecutor(1) as pool:
            calling = pool.submit(self._call, server, file, callers)
            time.sleep(_BUSY[0] * call_s)  # callers come and go at the ends
            before, client_before, begun_s = server.process.ask(), client.cpu_times(), time.perf_counter()
            time.sleep((_BUSY[1] - _BUSY[0]) * call_s)
            after, client_after = server.process.ask(), client.cpu_times()
            whole_s = (time.perf_counter() - begun_s) * usable_cores()
            figures = calling.result()
        taken = {kind: [b - a for a, b in zip(before[kind], after[kind], strict=True)] for kind in before}
        seconds = {
            "ONNX Runtime": sum(taken[RUNS]) + sum(taken[POOL]),
            "threads that run models": taken[WORKERS][0],
            "event loop": taken[LOOP][0],
            "gRPC's threads": taken[GRPC][0],
            "kernel": taken[WORKERS][1] + taken[LOOP][1] + taken[GRPC][1],
            "caller": sum(client_after[:2]) - sum(client_before[:2]),
        }
        seconds["idle, or others"] = whole_s - sum(seconds.values())
        row: dict[str, Any] = {"case": name, "callers": callers, "shares": _rounded(seconds, whole_s)}
        row |= {rate: figures[rate] for rate in ("inputs_per_s", "tokens_per_s") if rate in figures}
        if self.py_spy:
            with ThreadPoolExecutor(1) as pool:
                calling = pool.submit(self._call, server, file, callers)
                row["event loop"] = _sampled_loop(server.process.process_id, self.seconds, self.py_spy)
                calling.result()
        return row

    def lines(self) -> Iterator[str]:
        """Yields the lines of three tables, in percent."""
        for title, key in (
            ("of the cores", "shares"),
            ("of the event loop's thread", "event loop"),
            ("of ONNX Runtime's runs", "kinds"),
        ):
            names = list(dict.fromkeys(name for row in self.rows for name in row.get(key, ())))
            if names:
                yield from ("", f"percent {title} | " + " | ".join(names))
            for row in self.rows if names else ():
                cells = (f"{100 * row.get(key, {}).get(name, 0.0):.0f}" for name in names)
                yield f"{row['case']} x {row['callers']} | " + " | ".join(cells)


def _rounded(parts: Mapping[str, float], whole: float) -> dict[str, float]:
    return {name: round(part / whole, 3) for name, part in parts.items()}


def _sampled_loop(process_id: int, seconds: float, py_spy: str) -> dict[str, float]:
    """Samples the event loop's thread with py-spy: shares of its time in Python, gRPC, uvloop and other libraries.

    The innermost frame counts that belongs to one of them; samples of a thread that waits are not taken.
    """
    with tempfile.NamedTemporaryFile("r", suffix=".raw") as file:
        command = [py_spy, "record", "--native", "--threads", "--pid", str(process_id), "--duration", f"{seconds:.0f}"]
        command += ["--rate", "100", "--format", "raw", "--output", file.name]
        ended = subprocess.run(command, capture_output=True, text=True, check=False)
        if ended.returncode:
            return {}
        counts: Counter[str] = Counter()
        for line in Path(file.name).read_text(encoding="utf-8").splitlines():
            stack, _, count = line.rpartition(" ")
            frames = stack.split(";")
            if "MainThread" in frames[0]:
                counts[next(filter(None, map(_owner, reversed(frames))), "Python")] += int(count)
    whole = sum(counts.values())
    return {name: round(count / whole, 3) for name, count in counts.most_common()} if whole else {}


def _owner(frame: str) -> str | None:
    """Returns what a frame is part of; None for C code that any of them may call."""
    if "cygrpc" in frame or "grpc" in frame:
        return "gRPC"
    if "uvloop" in frame or "uv_" in frame or "uv__" in frame:
        return "uvloop"
    for name in ("onnxruntime", "tokenizers", "google/_upb", "numpy"):
        if name in frame:
            return {"google/_upb": "protobuf"}.get(name, name)
    return "Python" if ".py:" in frame or "python" in frame else None


def main() -> None:
    """Runs a server with a watch on it."""
    split = sys.argv.index("--")
    if "profile" in sys.argv[1:split]:
        profile(Path(tempfile.mkdtemp(dir=sys.argv[2])))
    else:
        watch()
    from headway_server.__main__ import main as run_server  # noqa: PLC0415 (after the watch)

    sys.argv = ["headway-server", *sys.argv[split + 1 :]]
    run_server()


if __name__ == "__main__":
    main()
