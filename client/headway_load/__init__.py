"""The load tester: calls a server at a set rate or concurrency and measures its latency for a caller.

This module is its public interface. It imports only public names of `headway_client`. There only the command line
imports it: `headway load`.
"""

from headway_load.objectives import Objective, Result, TimeLimits, time_limits
from headway_load.page import make_page
from headway_load.plan import (
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
from headway_load.processes import MAX_PROCESSES, LoadProcesses, Outcome, Snapshot
from headway_load.recorder import OK, CallRecord, Recorder, TimeHistogram
from headway_load.report import Report, compare, format_report, make_report, read_report
from headway_load.runner import LoadRunner, Sender, Share
from headway_load.samples import encode_png, sample_images, sample_inputs
from headway_load.scenario import Inputs, make_plan, make_workload, read_inputs, read_scenario, read_times
from headway_load.search import FIRST_RATE_PER_S, Probe, best, find_max, judge

__all__ = [
    "FIRST_RATE_PER_S",
    "MAX_CONCURRENCY",
    "MAX_DURATION_S",
    "MAX_OUTSTANDING",
    "MAX_PROCESSES",
    "MAX_RATE_PER_S",
    "OK",
    "Arrivals",
    "CallRecord",
    "Input",
    "Inputs",
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
