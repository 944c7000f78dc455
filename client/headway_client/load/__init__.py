"""The load tester: calls a server at a set rate or concurrency and measures what a caller experiences."""

from headway_client.load.plan import (
    MAX_CONCURRENCY,
    MAX_DURATION_S,
    MAX_OUTSTANDING,
    MAX_RATE_PER_S,
    LoadPlan,
    LoadTask,
)
from headway_client.load.recorder import OK, CallRecord, Recorder, TimeHistogram
from headway_client.load.report import format_report, make_report
from headway_client.load.runner import Input, LoadRunner, Sender, poisson_arrivals
from headway_client.load.samples import encode_png, sample_images, sample_inputs

__all__ = [
    "MAX_CONCURRENCY",
    "MAX_DURATION_S",
    "MAX_OUTSTANDING",
    "MAX_RATE_PER_S",
    "OK",
    "CallRecord",
    "Input",
    "LoadPlan",
    "LoadRunner",
    "LoadTask",
    "Recorder",
    "Sender",
    "TimeHistogram",
    "encode_png",
    "format_report",
    "make_report",
    "poisson_arrivals",
    "sample_images",
    "sample_inputs",
]
