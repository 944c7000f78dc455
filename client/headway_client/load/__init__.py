"""The load tester: calls a server at a set rate or concurrency and measures what a caller feels."""

from headway_client.load.plan import LoadPlan, LoadTask
from headway_client.load.report import make_report
from headway_client.load.runner import LoadRunner

__all__ = ["LoadPlan", "LoadRunner", "LoadTask", "make_report"]
