"""`headway-train`: trains models by recipes."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console
from rich.table import Table

from headway_training.data.datasets import DATASETS, find_dataset
from headway_training.data.sources import check_own_data, data_folder
from headway_training.errors import StoppedError, TrainingError
from headway_training.served.cli import evaluate

app = typer.Typer(
    name="headway-train",
    help="Trains transformer models by recipes, on public data sets or on your own data.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

app.command("evaluate")(evaluate)

_DATA_DIR_HELP = "Folder of the public data sets. Default: HEADWAY_DATA_DIR, or data/."


def _fail(error: TrainingError, console: Console) -> NoReturn:
    """Shows an error to the user; no traceback, as it says what to do."""
    console.print(f"[bold red]error:[/] {error}", soft_wrap=True, highlight=False)
    raise typer.Exit(1)


@app.command("run")
def run(
    recipe: Annotated[str, typer.Argument(help="Name of a recipe (see `headway-train list`), or a .toml file.")],
    data_dir: Annotated[Path | None, typer.Option(help=_DATA_DIR_HELP)] = None,
    output: Annotated[Path | None, typer.Option(help="Folder of the run. Default: runs/RECIPE.")] = None,
    train: Annotated[
        str | None,
        typer.Option(
            help="Your own training data: CSV with the columns text and label; source<TAB>target lines, or two files "
            "a.en,a.de; plain text; or a folder with a folder of images for each class."
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
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="section.key=value, in place of the recipe's. May be repeated.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in the output folder.")] = False,
    seed: Annotated[int, typer.Option(help="Seed of everything that is random.", min=0)] = 0,
    max_steps: Annotated[int | None, typer.Option(help="Most optimizer steps.", min=1)] = None,
) -> None:
    """Trains a model and leaves a checkpoint in OUTPUT/checkpoint.

    On several devices: `accelerate launch -m headway_training run RECIPE`, or
    `torchrun --nproc-per-node N -m headway_training run RECIPE`.
    """
    from headway_training.run import RunOptions, run_training  # noqa: PLC0415 (torch is slow to load, --help is not)

    console = Console(soft_wrap=True)
    try:
        options = RunOptions(
            recipe=recipe,
            settings=tuple(set_ or ()),
            data_dir=data_dir,
            own_data=check_own_data(train, valid, test),
            model=model,
            output=output,
            seed=seed,
            max_steps=max_steps,
            resume=resume,
        )
        run_training(options, console)
    except StoppedError as error:
        console.print(f"{error}; go on with the same command and --resume", highlight=False)
        raise typer.Exit(130) from error
    except TrainingError as error:
        _fail(error, Console(stderr=True))


@app.command("list")
def list_() -> None:
    """Lists the recipes."""
    from headway_training.recipes import list_recipes, read_recipe  # noqa: PLC0415 (as above)

    table = Table("recipe", "task", "description")
    for column in table.columns[:2]:
        column.no_wrap = True
    for file in list_recipes():
        recipe = read_recipe(file.stem)
        table.add_row(file.stem, recipe.task, recipe.description)
    Console().print(table)


@app.command("data")
def data(
    name: Annotated[str, typer.Argument(help=f"One of {', '.join(DATASETS)}.")],
    data_dir: Annotated[Path | None, typer.Option(help=_DATA_DIR_HELP)] = None,
    mirror: Annotated[
        str | None,
        typer.Option(help="Take the files from MIRROR/FOLDER/FILE instead of their public homes (http, https, file)."),
    ] = None,
) -> None:
    """Downloads a public data set, with checksums; what is there already is checked and kept."""
    from headway_training.data.download import download_dataset  # noqa: PLC0415 (as above)

    console = Console()
    try:
        dataset = find_dataset(name)
        folder = download_dataset(dataset, data_folder(data_dir), console, mirror=mirror)
    except TrainingError as error:
        _fail(error, Console(stderr=True))
    console.print(f"{dataset.title} is in {folder}\nlicence: {dataset.license}\nhome: {dataset.home}", highlight=False)


def main() -> None:
    """Entry point of `python -m headway_training`."""
    app(prog_name="headway-train" if Path(sys.argv[0]).name == "__main__.py" else None)
