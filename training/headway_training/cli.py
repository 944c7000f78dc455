"""`headway-train`: trains models by recipes, downloads their data, and measures what a server answers."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from headway_training.errors import EvaluationError, RecipeError, StoppedError, TrainingError
from headway_training.factory import check_factory

# Commands import what they need when they run: torch takes seconds to load, and --help needs none of it.

app = typer.Typer(
    name="headway-train",
    help="Trains transformer models by recipes, on public data sets or on your own data.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

EXIT_DIFFERS = 3
"""Exit code of `evaluate --check` if the figure is not the model card's."""

DataDir = Annotated[
    Path | None, typer.Option(help="Folder of the public data sets. Default: HEADWAY_DATA_DIR, or data/.")
]
Threads = Annotated[
    int | None,
    typer.Option(help="Threads on a CPU. Default: as many as cores are free; OMP_NUM_THREADS, if it is set.", min=1),
]


def _fail(error: TrainingError) -> NoReturn:
    """Shows an error to the user; it says what to do, so no traceback is shown."""
    Console(stderr=True, soft_wrap=True).print("[bold red]error:[/]", Text(str(error)), highlight=False)
    raise typer.Exit(1)


def _check_module(module: str | None) -> None:
    """Checks that a module of the user's own is there, before torch is imported.

    Raises:
        RecipeError: It is not.
    """
    try:
        if module is not None:
            check_factory(module, default=None)
    except ValueError as error:
        raise RecipeError(f"--module {error}") from error


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version  # noqa: PLC0415 (as the commands)

        typer.echo(f"headway-training {version('headway-training')}")
        raise typer.Exit


@app.callback()
def _main(
    _version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


@app.command("run")
def run(
    recipe: Annotated[str, typer.Argument(help="Name of a recipe (see `headway-train list`), or a .toml file.")],
    data_dir: DataDir = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Folder of the run. Default: runs/RECIPE.")
    ] = None,
    train: Annotated[
        str | None,
        typer.Option(
            help="Your own training data, in the form of the recipe's task: a table or a text, or a folder of images "
            "(docs/training.md#your-own-data)."
        ),
    ] = None,
    valid: Annotated[str | None, typer.Option(help="Your own validation data, as --train.")] = None,
    test: Annotated[
        str | None, typer.Option(help="Your own test data, as --train. Default: the validation data.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="Named configuration in place of the recipe's model, such as gpt3-small or bert-base."),
    ] = None,
    module: Annotated[
        str | None,
        typer.Option(
            help="Your own model in its place, as package.module:function (docs/bring-your-own.md); or package.module, "
            "which is imported for the architectures and tasks that it registers."
        ),
    ] = None,
    init: Annotated[
        Path | None,
        typer.Option(
            help="Folder of a checkpoint to start from: its weights, by name, and its tokenizer; or of a model of "
            "transformers."
        ),
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set", help="section.key=value, in place of the recipe's; section.key= takes it out. May be repeated."
        ),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in the output folder.")] = False,
    seed: Annotated[int, typer.Option(help="Seed of everything that is random.", min=0)] = 0,
    max_steps: Annotated[int | None, typer.Option(help="Most optimizer steps.", min=1)] = None,
    threads: Threads = None,
) -> None:
    """Trains a model and leaves a checkpoint in OUTPUT/checkpoint.

    On several devices: `accelerate launch -m headway_training run RECIPE`, or
    `torchrun --nproc-per-node N -m headway_training run RECIPE`.
    """
    console = Console(soft_wrap=True)
    try:
        _check_module(module)

        from headway_training.data.sources import check_own_data  # noqa: PLC0415 (see above)
        from headway_training.run import RunOptions, run_training  # noqa: PLC0415

        options = RunOptions(
            recipe=recipe,
            settings=tuple(set_ or ()),
            data_dir=data_dir,
            own_data=check_own_data(train, valid, test),
            model=model,
            module=module,
            init=init,
            output=output,
            seed=seed,
            max_steps=max_steps,
            resume=resume,
            threads=threads,
        )
        run_training(options, console)
    except StoppedError as error:
        console.print(f"{error}; go on with the same command and --resume", highlight=False)
        raise typer.Exit(130) from error
    except TrainingError as error:
        _fail(error)


@app.command("scale")
def scale(
    recipe: Annotated[str, typer.Argument(help="Name of a recipe (see `headway-train list`), or a .toml file.")],
    budget: Annotated[str, typer.Option(help="Time for all pilots together, such as 4h, 1h30m or 90s.")],
    target: Annotated[
        str | None,
        typer.Option(
            help="What to advise for: a time, or a number of FLOPs, such as 1e18. Default: ten times the budget."
        ),
    ] = None,
    data_dir: DataDir = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Folder of the study. Default: runs/RECIPE-scale.")
    ] = None,
    train: Annotated[str | None, typer.Option(help="Your own training data: plain text.")] = None,
    valid: Annotated[str | None, typer.Option(help="Your own validation data, as --train.")] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set", help="section.key=value, in place of the recipe's; section.key= takes it out. May be repeated."
        ),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the study in the output folder.")] = False,
    seed: Annotated[int, typer.Option(help="Seed of everything that is random.", min=0)] = 0,
    threads: Threads = None,
) -> None:
    """Trains pilots of several sizes and lengths, fits a scaling law to their losses, and advises what to train.

    Leaves scale.json and scale.svg in OUTPUT. The largest pilot is left out of the law and predicted by it.
    """
    from headway_training.data.sources import check_own_data  # noqa: PLC0415 (see above)
    from headway_training.run import RunOptions  # noqa: PLC0415
    from headway_training.scaling import parse_budget, run_scaling  # noqa: PLC0415

    console = Console(soft_wrap=True)
    try:
        options = RunOptions(
            recipe=recipe,
            settings=tuple(set_ or ()),
            data_dir=data_dir,
            own_data=check_own_data(train, valid, None),
            output=output or Path("runs") / f"{Path(recipe).stem}-scale",
            seed=seed,
            resume=resume,
            threads=threads,
        )
        for_pilots = parse_budget(budget, flops=False)
        run_scaling(options, for_pilots, None if target is None else parse_budget(target), console)
    except StoppedError as error:
        console.print(f"{error}; go on with the same command and --resume", highlight=False)
        raise typer.Exit(130) from error
    except TrainingError as error:
        _fail(error)


@app.command("list")
def list_() -> None:
    """Lists the recipes."""
    from headway_training.recipes import list_recipes, read_recipe  # noqa: PLC0415 (see above)

    table = Table("recipe", "task", "description")
    for column in table.columns[:2]:
        column.no_wrap = True
    for file in list_recipes():
        recipe = read_recipe(file.stem)
        table.add_row(file.stem, recipe.task, recipe.description)
    Console().print(table)


@app.command("data")
def data(
    name: Annotated[str, typer.Argument(help="Name of a data set, such as ag-news; a wrong name shows all of them.")],
    data_dir: DataDir = None,
    mirror: Annotated[
        str | None,
        typer.Option(help="Take the files from MIRROR/FOLDER/FILE instead of their public homes (http, https, file)."),
    ] = None,
) -> None:
    """Downloads a public data set and checks its checksums; files that are there already are only checked."""
    from headway_training.data.download import download_dataset  # noqa: PLC0415 (see above)
    from headway_training.data.public import find_dataset  # noqa: PLC0415
    from headway_training.data.sources import data_folder  # noqa: PLC0415

    console = Console(soft_wrap=True)
    try:
        dataset = find_dataset(name)
        if not dataset.files:
            console.print(f"{dataset.title} is made by the run that asks for it: there is nothing to download")
            return
        folder = download_dataset(dataset, data_folder(data_dir), console, mirror=mirror)
    except TrainingError as error:
        _fail(error)
    console.print(f"{dataset.title} is in {folder}\nlicence: {dataset.license}\nhome: {dataset.home}", highlight=False)


@app.command("make-data")
def make_data(
    name: Annotated[str, typer.Argument(help="What to make, such as emoji; a wrong name shows all that there is.")],
    data_dir: DataDir = None,
    mirror: Annotated[
        str | None,
        typer.Option(help="Take the sources from MIRROR/FILE instead of their public homes (http, https, file)."),
    ] = None,
) -> None:
    """Makes archives of a data set that has no home of its own, from what public homes have."""
    from headway_training.data.made import make_data as make  # noqa: PLC0415 (see above)
    from headway_training.data.sources import data_folder  # noqa: PLC0415

    console = Console(soft_wrap=True)
    try:
        made = make(name, data_folder(data_dir), console, mirror=mirror)
    except TrainingError as error:
        _fail(error)
    console.print(
        f"made: {', '.join(made.archives)}\nlicence: {made.license}\n{made.differs}".rstrip(), highlight=False
    )


@app.command("synthesise")
def synthesise(
    captions: Annotated[
        int, typer.Option(help="Captions of the training part that each synthesiser reads.", min=1)
    ] = 8000,
    seed: Annotated[int, typer.Option(help="Chooses captions, voices, speeds and pitches.", min=0)] = 0,
    data_dir: DataDir = None,
) -> None:
    """Lets flite and eSpeak NG read captions of Multi30k, for the data sets `speech` and `voices`.

    Both must be installed (apt-get install flite espeak-ng); the data set's folder notes their versions.
    """
    from headway_training.data.sources import data_folder  # noqa: PLC0415 (see above)
    from headway_training.data.synthesis import synthesise as make  # noqa: PLC0415

    console = Console()
    try:
        folder = make(data_folder(data_dir), console, num_captions=captions, seed=seed)
    except TrainingError as error:
        _fail(error)
    console.print(f"the recordings are in {folder}", highlight=False)


@app.command("evaluate")
def evaluate(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Name of a model that the server has loaded.")],
    server: Annotated[str, typer.Option(metavar="ADDRESS", help="Host and port of the server.")] = "127.0.0.1:50051",
    model_version: Annotated[str, typer.Option(help="Version of the model. Default: the latest one loaded.")] = "",
    data: Annotated[
        str | None,
        typer.Option(
            help="Data set whose test part is measured, or its recipe's .toml file. Default: that of the recipe "
            "named like the model."
        ),
    ] = None,
    file: Annotated[
        str | None,
        typer.Option(
            "--file",
            "-f",
            help="Your own data instead, in the form that `headway-train run --test` takes; for vectors of images, a "
            "table with the columns file and caption.",
        ),
    ] = None,
    data_dir: DataDir = None,
    label_separator: Annotated[
        str, typer.Option(help="The character between the labels of a text in --file, if several may apply.")
    ] = "|",
    limit: Annotated[
        int | None, typer.Option(help="Only the first so many examples, or characters of a running text.", min=1)
    ] = None,
    batch_size: Annotated[int, typer.Option(help="Inputs of a request.", min=1, max=256)] = 16,
    concurrency: Annotated[int, typer.Option(help="Requests in flight at a time.", min=1, max=1024)] = 4,
    beam_size: Annotated[int | None, typer.Option(help="Beams of a translation. Default: the server's.", min=1)] = None,
    option: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="Another option of the client's call. May be repeated."),
    ] = None,
    timeout: Annotated[float, typer.Option(help="Longest time of a request, in seconds.", min=0.001)] = 300.0,
    check: Annotated[
        bool, typer.Option("--check", help=f"Exit with {EXIT_DIFFERS} if the figure is not the model card's.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="End with one line of JSON on stdout.")] = False,
) -> None:
    """Measures a model that a server runs, so that anyone can check its card.

    Exit codes: 0 measured; 1 it could not be; 2 wrong usage; 3 the figure is not the card's (--check).
    """
    try:
        import headway_client  # noqa: F401, PLC0415 (an extra)
    except ImportError:
        _fail(
            EvaluationError(
                "headway-train evaluate asks a server through the client, which is not installed; "
                "install it with pip install 'headway-training[evaluate]'"
            )
        )
    from headway_training.served import EvaluationOptions, evaluate_served  # noqa: PLC0415 (see above)

    try:
        report = evaluate_served(
            EvaluationOptions(
                model=model,
                model_version=model_version,
                server=server,
                dataset=data,
                file=file,
                data_dir=data_dir,
                label_separator=label_separator,
                limit=limit,
                batch_size=batch_size,
                concurrency=concurrency,
                settings=(*(option or ()), *(() if beam_size is None else (f"beam_size={beam_size}",))),
                timeout_s=timeout,
            ),
            Console(stderr=True, soft_wrap=True),
        )
    except TrainingError as error:
        _fail(error)
    typer.echo(report.lines(), err=as_json)
    if as_json:
        typer.echo(report.json())
    if check and not report.agrees:
        raise typer.Exit(EXIT_DIFFERS)


def main() -> None:
    """Entry point of `python -m headway_training`."""
    app(prog_name="headway-train" if Path(sys.argv[0]).name == "__main__.py" else None)
