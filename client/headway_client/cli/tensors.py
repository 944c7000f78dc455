"""The command that sends arrays to a model and prints or writes those that it answers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from headway_client.cli.flags import AsJson, ConnectionFlags, connected, reported_failures, takes_options
from headway_client.cli.models import ModelArgument
from headway_client.cli.output import print_json
from headway_client.results import import_numpy
from headway_client.tensors import Parameter


@takes_options
def infer(
    model: ModelArgument,
    *,
    input_: Annotated[
        list[str] | None,
        typer.Option(
            "--input",
            "-i",
            metavar="NAME=FILE.npy|NAME=JSON|FILE.npz",
            help="Input: an array file, nested lists in JSON, or all arrays of an .npz. May be repeated.",
        ),
    ] = None,
    output_name: Annotated[
        list[str] | None, typer.Option("--output-name", metavar="NAME", help="Output to return. May be repeated.")
    ] = None,
    parameter: Annotated[
        list[str] | None, typer.Option(metavar="KEY=VALUE", help="Parameter of the model's task. May be repeated.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE.npz", help="Write the outputs to FILE.")
    ] = None,
    model_version: Annotated[
        str | None, typer.Option("--model-version", help="Version of the model. Default: by the model's route.")
    ] = None,
    as_json: AsJson = False,
    connection: ConnectionFlags,
) -> None:
    """Send arrays to a model of any task, and print the arrays that it answers."""
    with reported_failures(connection):
        inputs = _read_inputs(input_ or ())
    parameters = dict(map(_parameter, parameter or ()))
    with connected(connection, output) as client:
        answer = client.infer(
            model, inputs, outputs=output_name or (), parameters=parameters, model_version=model_version
        )
        if output is not None:
            with output.open("wb") as stream:  # under the name that was given
                import_numpy().savez(stream, **{name: _writable(array) for name, array in answer.items()})
    if as_json:
        print_json({name: _in_json(array) for name, array in answer.items()})
        return
    for name, array in answer.items():
        typer.echo(f"{name} {'texts' if array.dtype == object else array.dtype} {list(array.shape)}")
        if output is None:
            typer.echo(str(array))


def _read_inputs(given: Sequence[str]) -> dict[str, Any]:
    """Reads the inputs of a command.

    Raises:
        OSError, ValueError: One cannot be read.
    """
    if not given:
        raise typer.BadParameter("there is no input; give NAME=FILE.npy or FILE.npz", param_hint="--input")
    np, inputs = import_numpy(), dict[str, Any]()
    for entry in given:
        name, equals, value = entry.partition("=")
        try:
            if not equals:
                with np.load(entry, allow_pickle=False) as arrays:
                    inputs.update(arrays)
            elif value.endswith(".npy"):
                inputs[name] = np.load(value, allow_pickle=False)
            else:
                inputs[name] = np.array(json.loads(value))
        except (ValueError, TypeError, AttributeError) as error:
            raise ValueError(f"--input {entry}: is neither an array file nor JSON ({error})") from None
    return inputs


def _parameter(entry: str) -> tuple[str, Parameter]:
    key, equals, text = entry.partition("=")
    if not key or not equals:
        raise typer.BadParameter(f"{entry!r} is not a key and a value, such as top_k=3", param_hint="--parameter")
    try:
        value = json.loads(text)
    except ValueError:
        return key, text
    return key, value if isinstance(value, bool | int | float | str) else text


def _writable(array: Any) -> Any:
    return array.astype(str) if array.dtype == object and not _has_bytes(array) else array


def _has_bytes(array: Any) -> bool:
    return any(isinstance(element, bytes) for element in array.flat)


def _in_json(array: Any) -> Any:
    if array.dtype == object and _has_bytes(array):
        raise ValueError("an output has elements that are no UTF-8; write it with --output FILE.npz")
    return array.tolist()
