"""The report of classification, for people."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

_WIDTH = 26


def format_report(report: Mapping[str, Any]) -> Iterator[str]:
    """The figures in lines."""
    for model in report["models"]:
        callers = report["settings"]["callers"]
        rows = [row for row in report["rows"] if any(load["model"] == model["name"] for load in row["loads"])]
        yield ""
        yield f"{model['name']} {model['precision']}: {model['inputs']}"
        yield "inputs/s".ljust(_WIDTH) + "".join(f"{f'{number} callers':>14}" for number in callers)
        for row in rows:
            yield from _row(row, model["name"], callers)
        for figure, title in (("latency_p50_ms", "p50 ms"), ("latency_p99_ms", "p99 ms")):
            for row in rows:
                if any(figure in load for load in row["loads"]):
                    cells = _cells(row, model["name"], callers, figure, "{:,.3g}")
                    yield f"{title}, {row['name']}".ljust(_WIDTH) + cells
    yield ""
    for failure in report["failures"]:
        yield f"not measured: {failure['model']}, {failure['row']}: {failure['error']}"
    for target in report["targets"]:
        verdict = "hit   " if target["hit"] else "MISSED"
        sign = ">=" if target["at_least"] else "<="
        yield f"{verdict} {target['name']}: {target['value']:.3g} (target {sign} {target['target']:.3g})"


def _row(row: Mapping[str, Any], model: str, callers: list[int]) -> Iterator[str]:
    yield f"{row['name']:<{_WIDTH}}" + _cells(row, model, callers, "inputs_per_s", "{:,.1f}")
    settings = {
        load["callers"]: load["setting"] for load in row["loads"] if load["model"] == model and "setting" in load
    }
    for setting in dict.fromkeys(settings.values()):
        where = ", ".join(str(number) for number, name in settings.items() if name == setting)
        yield f"  {where}: {setting}"


def _cells(row: Mapping[str, Any], model: str, callers: list[int], figure: str, form: str) -> str:
    values = {load["callers"]: load.get(figure) for load in row["loads"] if load["model"] == model}
    return "".join(f"{'-' if values.get(key) is None else form.format(values[key]):>14}" for key in callers)
