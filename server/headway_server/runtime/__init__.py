"""ONNX Runtime: sessions, the device they run on, its threads and its memory."""

from headway_server.runtime.binding import Binding
from headway_server.runtime.capacity import available_bytes
from headway_server.runtime.cores import Cores, Seats
from headway_server.runtime.processor import has_exact_int8, usable_cores
from headway_server.runtime.session import Device, Runtime, Session

__all__ = [
    "Binding",
    "Cores",
    "Device",
    "Runtime",
    "Seats",
    "Session",
    "available_bytes",
    "has_exact_int8",
    "usable_cores",
]
