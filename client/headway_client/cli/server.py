"""The commands that ask what a server is and has: models, model, health."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from headway_client import results
from headway_client.base import DEFAULT_TIMEOUT_S
from headway_client.channels import DEFAULT_SERVER
from headway_client.cli import parameters
from headway_client.cli.output import as_dict, print_json, print_table
from headway_client.cli.parameters import connected, fail

TaskName = Annotated[results.Task | None, typer.Option("--task", help="Only models for this task.")]


def models(
    task: TaskName = None,
    server: parameters.Server = DEFAULT_SERVER,
    timeout: parameters.Timeout = DEFAULT_TIMEOUT_S,
    as_json: parameters.AsJson = False,
) -> None:
    """List the loaded models.

    Bundles that could not be loaded are told on stderr.
    """
    with connected(server, timeout) as client:
        listing = client.models(task)
    if as_json:
        for model in listing:
            print_json(as_dict(model))
    else:
        head = ("NAME", "VERSION", "TASK", "VARIANT", "DEVICE", "PARAMETERS", "QUALITY", "DESCRIPTION")
        print_table([head, *(_row(model) for model in listing)])
    for bundle in listing.rejected_bundles:
        typer.echo(f"headway: not loaded: {bundle.path}: {bundle.reason}", err=True)


def model(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the model.")],
    model_version: parameters.ModelVersion = "",
    server: parameters.Server = DEFAULT_SERVER,
    timeout: parameters.Timeout = DEFAULT_TIMEOUT_S,
    as_json: parameters.AsJson = False,
) -> None:
    """Show everything about one model.

    With --json, its bundle's manifest too.
    """
    with connected(server, timeout) as client:
        details = client.model(name, model_version=model_version)
    if as_json:
        print_json({**as_dict(details.model), "manifest": json.loads(details.manifest_json or "null")})
        return
    fields = as_dict(details.model)
    quality = fields.pop("quality")
    rows = [(field.replace("_", " "), _value(value)) for field, value in fields.items() if value not in ("", (), None)]
    print_table([*rows, *(("quality", _value(figure)) for figure in quality)])


def health(
    service: Annotated[str, typer.Option("--service", metavar="NAME", help="Full name of one service.")] = "",
    wait: Annotated[float, typer.Option("--wait", metavar="SECONDS", min=0, help="Wait for the server to serve.")] = 0,
    server: parameters.Server = DEFAULT_SERVER,
    timeout: parameters.Timeout = DEFAULT_TIMEOUT_S,
    as_json: parameters.AsJson = False,
) -> None:
    """Tell whether the server serves.

    Exit code 0 if it does, 1 if not.
    """
    with connected(server, timeout) as client:
        if wait > 0:
            client.wait_ready(wait)
        status = client.health(service)
    if as_json:
        print_json({"server": server, "service": service, "status": status.value})
    else:
        typer.echo(status.value)
    if status is not results.HealthStatus.SERVING:
        fail(f"{service or server} is not serving: {status.value}", 1)


def _row(model: results.Model) -> tuple[str, ...]:
    """A line of the list of models."""
    quality = next((figure for figure in model.quality if figure.variant == model.variant), None)
    return (
        model.name,
        model.version,
        model.task.value,
        model.variant,
        model.device,
        f"{model.parameter_count:,}",
        f"{quality.metric} {quality.value:.4g}" if quality else "-",
        model.description,
    )


def _value(value: object) -> str:
    """A field of a model on one line."""
    if isinstance(value, list | tuple):
        return ", ".join(_value(item) for item in value)
    if isinstance(value, dict):
        return " ".join(f"{key}={_value(item)}" for key, item in value.items() if item is not None)
    if isinstance(value, float):
        return f"{value:.6g}"
    return f"{value:,}" if isinstance(value, int) else str(value)
