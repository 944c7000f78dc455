"""`headway-train evaluate`."""

from __future__ import annotations

import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from headway_training.errors import EvaluationError, TrainingError

if TYPE_CHECKING:
    from headway_training.served.report import EvaluationReport
    from headway_training.served.sender import Sender

DEFAULT_SERVER = "127.0.0.1:50051"
EXIT_DIFFERS = 3
"""Exit code where `--check` finds another figure than the card's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Where the data comes from, as the command line has it."""

    dataset: str | None
    file: str | None
    folder: Path | None
    limit: int | None
    label_separator: str


def evaluate(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Name of a model that the server has loaded.")],
    server: Annotated[str, typer.Option(metavar="ADDRESS", help="Host and port of the server.")] = DEFAULT_SERVER,
    model_version: Annotated[str, typer.Option(help="Version of the model. Default: the latest one loaded.")] = "",
    data: Annotated[
        str | None,
        typer.Option(help="Data set whose test part is measured. Default: that of the recipe named like the model."),
    ] = None,
    file: Annotated[
        str | None, typer.Option(help="Your own data instead, in the form that `headway-train run --test` takes.")
    ] = None,
    data_dir: Annotated[
        Path | None, typer.Option(help="Folder of the public data sets. Default: HEADWAY_DATA_DIR, or data/.")
    ] = None,
    label_separator: Annotated[
        str, typer.Option(help="What separates the labels of a text in --file, where several may apply.")
    ] = "|",
    limit: Annotated[
        int | None, typer.Option(help="Only the first so many examples, or characters of a running text.", min=1)
    ] = None,
    batch_size: Annotated[int, typer.Option(help="Inputs of a request.", min=1, max=256)] = 16,
    concurrency: Annotated[int, typer.Option(help="Requests on their way at a time.", min=1, max=1024)] = 4,
    beam_size: Annotated[int | None, typer.Option(help="Beams of a translation. Default: the server's.", min=1)] = None,
    option: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="Another option of the client's call. May be repeated."),
    ] = None,
    timeout: Annotated[float, typer.Option(help="Longest time of a request, in seconds.", min=0.001)] = 300.0,
    check: Annotated[
        bool, typer.Option("--check", help=f"Exit with {EXIT_DIFFERS} where the figure is not the model card's.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="End with one line of JSON on stdout.")] = False,
) -> None:
    """Measures a model that a server runs, as anyone can who checks its card.

    Exit codes: 0 measured; 1 it could not be; 2 wrong usage; 3 the figure is not the card's (--check).
    """
    errors = Console(stderr=True, soft_wrap=True)
    try:
        if data is not None and file is not None:
            raise EvaluationError("--data and --file are both given; name one of them")
        with _bar(errors) as sender_hooks:
            report = _measure(
                model=model,
                model_version=model_version,
                server=server,
                source=Source(dataset=data, file=file, folder=data_dir, limit=limit, label_separator=label_separator),
                options=_options(beam_size, option or ()),
                timeout_s=timeout,
                sending={"batch_size": batch_size, "concurrency": concurrency, **sender_hooks},
            )
    except TrainingError as error:
        errors.print(f"[bold red]error:[/] {error}", highlight=False)
        raise typer.Exit(1) from error
    typer.echo(report.lines(), err=as_json)
    if as_json:
        typer.echo(report.json())
    if check and not report.agrees:
        raise typer.Exit(EXIT_DIFFERS)


def _measure(
    *,
    model: str,
    model_version: str,
    server: str,
    source: Source,
    options: Mapping[str, object],
    timeout_s: float,
    sending: Mapping[str, Any],
) -> EvaluationReport:
    """Measures, with every failure as an error of this package.

    Raises:
        EvaluationError: The client is not installed, or a call fails.
        DataError: The data cannot be read.
    """
    _check_client()
    from headway_client import Client, HeadwayError  # noqa: PLC0415 (an extra; torch and gRPC are slow to load)
    from headway_training.data.sources import data_folder  # noqa: PLC0415 (as above)
    from headway_training.served.data import first_examples, read_dataset, read_file, text_form  # noqa: PLC0415 (as above)
    from headway_training.served.measures import ServedModel, measure  # noqa: PLC0415 (as above)
    from headway_training.served.report import EvaluationReport  # noqa: PLC0415 (as above)
    from headway_training.served.sender import Sender  # noqa: PLC0415 (as above)

    try:
        with Client(server, timeout_s=timeout_s) as client:
            details = client.get_model(model, model_version=model_version)
            loaded = details.model
            if source.file is not None:
                form = text_form(details.manifest_json, source.label_separator)
                whole = read_file(loaded, source.file, form)
            else:
                whole = read_dataset(loaded, source.dataset, data_folder(source.folder))
            used = first_examples(whole, source.limit)
            sender: Sender = Sender(**sending)
            start_s = time.perf_counter()
            measured = measure(ServedModel(client=client, model=loaded, sender=sender, options=options), used.examples)
    except HeadwayError as error:
        raise EvaluationError(str(error)) from error
    except (TypeError, ValueError) as error:  # of the client: an option's value has a wrong type or range
        raise EvaluationError(f"the client's call cannot be made: {error}") from error
    return EvaluationReport(
        model=loaded,
        dataset=used.name,
        whole=used is whole,
        measurement=measured,
        wall_time_s=time.perf_counter() - start_s,
    )


def _check_client() -> None:
    try:
        import headway_client  # noqa: F401, PLC0415 (an extra)
    except ImportError as error:
        raise EvaluationError(
            "headway-train evaluate asks a server through the client, which is not installed; "
            "install it with pip install 'headway-training[evaluate]'"
        ) from error


def _options(beam_size: int | None, settings: Sequence[str]) -> dict[str, object]:
    """Options of the client's call; a value is written as in TOML, a bare word is a string."""
    options: dict[str, object] = {} if beam_size is None else {"beam_size": beam_size}
    for setting in settings:
        name, separator, text = setting.partition("=")
        if not separator or not name.strip().isidentifier():
            raise EvaluationError(f"--option {setting}: expected NAME=VALUE, such as beam_size=4")
        try:
            options[name.strip()] = tomllib.loads(f"value = {text}")["value"]
        except tomllib.TOMLDecodeError:
            options[name.strip()] = text.strip()
    return options


@contextmanager
def _bar(console: Console) -> Iterator[dict[str, Any]]:
    """A progress bar on a terminal; gives the hooks of a `Sender` that move it."""
    columns = (TextColumn("[bold]measuring"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("measuring", total=None)
        yield {
            "begin": lambda total: bar.update(task, total=total),
            "advance": lambda count: bar.advance(task, count),
        }
