"""ONNX Runtime: sessions, the device they run on, its threads and its memory."""

from headway_server.runtime.binding import Binding
from headway_server.runtime.cores import Cores, Seats
from headway_server.runtime.machine import Device, available_bytes, describe_cores, has_exact_int8, usable_cores
from headway_server.runtime.session import Runtime, Session
from headway_server.runtime.threads import CLOSE_TIMEOUT_S, Heartbeat, join_threads

__all__ = [
    "CLOSE_TIMEOUT_S",
    "Binding",
    "Cores",
    "Device",
    "Heartbeat",
    "Runtime",
    "Seats",
    "Session",
    "available_bytes",
    "describe_cores",
    "has_exact_int8",
    "join_threads",
    "usable_cores",
]
