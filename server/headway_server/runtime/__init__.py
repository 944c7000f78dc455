"""ONNX Runtime: sessions, the device they run on, its threads and its memory."""

from headway_server.runtime.binding import Binding
from headway_server.runtime.capacity import available_bytes
from headway_server.runtime.cores import Cores, Seats
from headway_server.runtime.processor import has_exact_int8, usable_cores
from headway_server.runtime.session import Device, Runtime, Session
from headway_server.runtime.threads import Heartbeat, join_threads

__all__ = [
    "Binding",
    "Cores",
    "Device",
    "Heartbeat",
    "Runtime",
    "Seats",
    "Session",
    "available_bytes",
    "has_exact_int8",
    "join_threads",
    "usable_cores",
]
