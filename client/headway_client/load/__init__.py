"""The load tester: calls a server at a set rate or concurrency and measures what a caller experiences."""

from headway_client.load.objectives import Objective, Result, TimeLimits, time_limits
from headway_client.load.page import make_page
from headway_client.load.plan import (
    MAX_CONCURRENCY,
    MAX_DURATION_S,
    MAX_OUTSTANDING,
    MAX_RATE_PER_S,
    Arrivals,
    Input,
    LoadPlan,
    LoadTask,
    Workload,
)
from headway_client.load.processes import LoadProcesses, Outcome, Snapshot
from headway_client.load.recorder import OK, CallRecord, Recorder, TimeHistogram
from headway_client.load.report import Report, compare, format_report, make_report, read_report
from headway_client.load.runner import LoadRunner, Sender, Share
from headway_client.load.samples import encode_png, sample_images, sample_inputs
from headway_client.load.scenario import make_plan, make_workload, read_inputs, read_scenario, read_times
from headway_client.load.search import Probe, best, find_max, judge

__all__ = [
    "MAX_CONCURRENCY",
    "MAX_DURATION_S",
    "MAX_OUTSTANDING",
    "MAX_RATE_PER_S",
    "OK",
    "Arrivals",
    "CallRecord",
    "Input",
    "LoadPlan",
    "LoadProcesses",
    "LoadRunner",
    "LoadTask",
    "Objective",
    "Outcome",
    "Probe",
    "Recorder",
    "Report",
    "Result",
    "Sender",
    "Share",
    "Snapshot",
    "TimeHistogram",
    "TimeLimits",
    "Workload",
    "best",
    "compare",
    "encode_png",
    "find_max",
    "format_report",
    "judge",
    "make_page",
    "make_plan",
    "make_report",
    "make_workload",
    "read_inputs",
    "read_report",
    "read_scenario",
    "read_times",
    "sample_images",
    "sample_inputs",
    "time_limits",
]
