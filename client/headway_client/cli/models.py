"""The commands about a server and its models."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Annotated

import typer

from headway_client import results
from headway_client.cli.flags import AsJson, ConnectionFlags, connected, fail, takes_options
from headway_client.cli.output import as_dict, print_json, print_table

ModelArgument = Annotated[str, typer.Argument(metavar="NAME", help="Name of the model.")]


@takes_options
def list_models(
    *,
    task: Annotated[str, typer.Option("--task", help='List only models for this task, such as "generation".')] = "",
    capability: Annotated[
        str, typer.Option("--capability", help='List only models that can do this, such as "embed_text" or "chat".')
    ] = "",
    as_json: AsJson = False,
    connection: ConnectionFlags,
) -> None:
    """List the loaded models.

    Bundles that could not be loaded are listed on stderr.
    """
    with connected(connection) as client:
        listing = client.list_models(task, capability)
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
    model: ModelArgument,
    *,
    model_version: Annotated[
        str | None, typer.Option("--model-version", help="Version of the model. Default: by the model's route.")
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
def list_bundles(*, as_json: AsJson = False, connection: ConnectionFlags) -> None:
    """List the bundles of the store, loaded or not, and the routes of calls without a version."""
    with connected(connection) as client:
        listing = client.list_bundles()
    if as_json:
        print_json(as_dict(listing))
        return
    _print_bundles(listing)
    if listing.routes:
        typer.echo()
        _print_routes(listing.routes)
    if listing.aliases:
        typer.echo()
        _print_aliases(listing.aliases)
    if listing.store_problem:
        typer.echo(f"headway: the store: {listing.store_problem}", err=True)


@takes_options
def load_model(
    model: ModelArgument,
    *,
    model_version: Annotated[
        str | None, typer.Option("--model-version", help="Version to load. Default: the latest in the store.")
    ] = None,
    as_json: AsJson = False,
    connection: ConnectionFlags,
) -> None:
    """Load a version from the store, or reload it; no call fails."""
    with connected(connection) as client:
        loaded = client.load_model(model, model_version=model_version)
    if as_json:
        print_json(as_dict(loaded))
    else:
        typer.echo(f"{loaded.name} {loaded.version} ({loaded.variant}) is ready")


@takes_options
def unload_model(
    model: ModelArgument,
    *,
    model_version: Annotated[
        str | None, typer.Option("--model-version", help="Version to unload. Default: every version.")
    ] = None,
    connection: ConnectionFlags,
) -> None:
    """Unload a model once its calls have finished."""
    with connected(connection) as client:
        client.unload_model(model, model_version=model_version)
        listing = client.list_bundles()
    for what, version in _names_of(listing, model):
        if model_version in (None, version):
            typer.echo(
                f"headway: {what} still names {model} {version}, which is not loaded; change it by set-route or "
                "set-alias, or load the version again",
                err=True,
            )


@takes_options
def scan_store(*, as_json: AsJson = False, connection: ConnectionFlags) -> None:
    """Rescan the store now, and list the bundles that changed."""
    with connected(connection) as client:
        changed = client.scan_store()
    if as_json:
        for bundle in changed:
            print_json(as_dict(bundle))
    elif changed:
        _print_bundles(changed)
    else:
        typer.echo("headway: nothing has changed", err=True)


@takes_options
def set_route(
    model: ModelArgument,
    *,
    default_version: Annotated[
        str | None,
        typer.Option("--default-version", metavar="VERSION", help="Version that answers. Default: the latest."),
    ] = None,
    canary_version: Annotated[
        str | None,
        typer.Option(
            "--canary-version", metavar="VERSION", help="Version that answers a share of the calls. Default: none."
        ),
    ] = None,
    canary_share: Annotated[
        float | None, typer.Option("--canary-share", min=0, max=1, help="Canary's share of the calls, such as 0.05.")
    ] = None,
    as_json: AsJson = False,
    connection: ConnectionFlags,
) -> None:
    """Set the versions of a model for calls without a version, and list all routes.

    Flags left out are reset: without any, the latest version answers.
    """
    with connected(connection) as client:
        listing = client.set_route(
            model, default_version=default_version, canary_version=canary_version, canary_share=canary_share
        )
    if as_json:
        print_json(as_dict(listing))
    elif listing.routes:
        _print_routes(listing.routes)
    else:
        typer.echo("headway: no model has a route; the latest version answers", err=True)
    _print_not_kept(listing.not_kept_reason)


@takes_options
def set_alias(
    alias: Annotated[str, typer.Argument(metavar="ALIAS", help="Alias to set or remove.")],
    model: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="Model of the alias. Default: none; removes the alias.")
    ] = None,
    *,
    model_version: Annotated[
        str | None, typer.Option("--model-version", help="Version of the alias. Default: by the model's route.")
    ] = None,
    as_json: AsJson = False,
    connection: ConnectionFlags,
) -> None:
    """Set or remove an alias of a model, and list all aliases."""
    with connected(connection) as client:
        listing = client.set_alias(alias, model=model, model_version=model_version)
    if as_json:
        print_json(as_dict(listing))
    elif listing.aliases:
        _print_aliases(listing.aliases)
    else:
        typer.echo("headway: no model has an alias", err=True)
    _print_not_kept(listing.not_kept_reason)


@takes_options
def health(
    *,
    service: Annotated[str, typer.Option("--service", metavar="NAME", help="Full name of one service.")] = "",
    wait: Annotated[
        float, typer.Option("--wait", metavar="SECONDS", min=0, help="Wait up to SECONDS until the server is ready.")
    ] = 0,
    as_json: AsJson = False,
    connection: ConnectionFlags,
) -> None:
    """Check the health of the server.

    The exit code is 0 if it is serving, 1 if not.
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


def _names_of(listing: results.BundleList, model: str) -> Iterator[tuple[str, str]]:
    """Yields every name of a version of a model, with the version."""
    for route in listing.routes:
        if route.model == model:
            yield from (("its default", route.default_version),) if route.default_version else ()
            yield from (("its canary", route.canary_version),) if route.canary_version else ()
    for alias in listing.aliases:
        if alias.model == model and alias.model_version:
            yield f"the alias {alias.alias}", alias.model_version


def _print_bundles(bundles: Iterable[results.BundleStatus]) -> None:
    rows = [(bundle.name, bundle.version, bundle.state.value, bundle.reason) for bundle in bundles]
    print_table([("NAME", "VERSION", "STATE", "REASON"), *rows])


def _print_routes(routes: Iterable[results.Route]) -> None:
    rows = [
        (route.model, route.default_version or "latest", route.canary_version or "-", f"{route.canary_share:.4g}")
        for route in routes
    ]
    print_table([("MODEL", "DEFAULT", "CANARY", "SHARE"), *rows])


def _print_aliases(aliases: Iterable[results.Alias]) -> None:
    rows = [(alias.alias, alias.model, alias.model_version or "as routed") for alias in aliases]
    print_table([("ALIAS", "MODEL", "VERSION"), *rows])


def _print_not_kept(reason: str) -> None:
    if reason:
        typer.echo(f"headway: the change is lost when the server stops: {reason}", err=True)


def _row(model: results.Model) -> tuple[str, ...]:
    """Returns a line of the list of models."""
    quality = next((figure for figure in model.quality if figure.variant == model.variant), None)
    return (
        model.name,
        model.version,
        model.task,
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
