"""ONNX Runtime: sessions, the machine they run on, bound buffers, threads."""

from headway_server.runtime.binding import Binding
from headway_server.runtime.cores import BusyLanes, Cores
from headway_server.runtime.machine import (
    Device,
    available_bytes,
    describe_cores,
    format_size,
    give_back_memory,
    has_exact_int8,
    map_large_arrays,
    share_memory,
    usable_cores,
)
from headway_server.runtime.session import TENSOR_TYPES, Runtime, Session, sum_exactly
from headway_server.runtime.threads import (
    CLOSE_TIMEOUT_S,
    Heartbeat,
    close_together,
    join_threads,
    own_niceness,
    run_nicely,
    set_own_niceness,
)

__all__ = [
    "CLOSE_TIMEOUT_S",
    "TENSOR_TYPES",
    "Binding",
    "BusyLanes",
    "Cores",
    "Device",
    "Heartbeat",
    "Runtime",
    "Session",
    "available_bytes",
    "close_together",
    "describe_cores",
    "format_size",
    "give_back_memory",
    "has_exact_int8",
    "join_threads",
    "map_large_arrays",
    "own_niceness",
    "run_nicely",
    "set_own_niceness",
    "share_memory",
    "sum_exactly",
    "usable_cores",
]
