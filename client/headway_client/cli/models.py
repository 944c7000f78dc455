"""The commands about a server and its models: list-models, get-model, health."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from headway_client import results
from headway_client.cli.flags import AsJson, ConnectionFlags, connected, fail, takes_options
from headway_client.cli.output import as_dict, print_json, print_table


@takes_options
def list_models(
    *,
    task: Annotated[results.Task | None, typer.Option("--task", help="List only models for this task.")] = None,
    as_json: AsJson = False,
    connection: ConnectionFlags,
) -> None:
    """List the loaded models.

    Bundles that could not be loaded are listed on stderr.
    """
    with connected(connection) as client:
        listing = client.list_models(task)
    if as_json:
        for model in listing:
            print_json(as_dict(model))
    else:
        head = ("NAME", "VERSION", "TASK", "VARIANT", "DEVICE", "PARAMETERS", "QUALITY", "DESCRIPTION")
        print_table([head, *(_row(model) for model in listing)])
    for bundle in listing.rejected_bundles:
        typer.echo(f"headway: not loaded: {bundle.path}: {bundle.reason}", err=True)


@takes_options
def get_model(
    model: Annotated[str, typer.Argument(metavar="NAME", help="Name of the model.")],
    *,
    model_version: Annotated[
        str | None, typer.Option("--model-version", help="Version of the model. Default: the latest loaded version.")
    ] = None,
    as_json: AsJson = False,
    connection: ConnectionFlags,
) -> None:
    """Describe one model.

    --json also prints its bundle's manifest.
    """
    with connected(connection) as client:
        details = client.get_model(model, model_version=model_version)
    fields = as_dict(details.model)
    if as_json:
        print_json({**fields, "manifest": json.loads(details.manifest_json or "null")})
        return
    quality = fields.pop("quality")
    rows = [(name.replace("_", " "), _value(value)) for name, value in fields.items() if value not in ("", (), None)]
    print_table([*rows, *(("quality", _value(figure)) for figure in quality)])


@takes_options
def health(
    *,
    service: Annotated[str, typer.Option("--service", metavar="NAME", help="Full name of one service.")] = "",
    wait: Annotated[
        float, typer.Option("--wait", metavar="SECONDS", min=0, help="Wait this long for the server to serve.")
    ] = 0,
    as_json: AsJson = False,
    connection: ConnectionFlags,
) -> None:
    """Check whether the server serves.

    The exit code is 0 if it does, 1 if not.
    """
    with connected(connection) as client:
        if wait > 0:
            client.wait_ready(wait)
        status = client.health(service)
    if as_json:
        print_json({"server": client.server, "service": service, "status": status.value})
    else:
        typer.echo(status.value)
    if status is not results.HealthStatus.SERVING:
        fail(f"{service or client.server} is not serving: {status.value}", 1)


def _row(model: results.Model) -> tuple[str, ...]:
    """Returns a line of the list of models."""
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
    """Returns a field of a model on one line."""
    if isinstance(value, list | tuple):
        return ", ".join(_value(item) for item in value)
    if isinstance(value, dict):
        return " ".join(f"{key}={_value(item)}" for key, item in value.items() if item is not None)
    if isinstance(value, float):
        return f"{value:.6g}"
    return f"{value:,}" if isinstance(value, int) else str(value)
