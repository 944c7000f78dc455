"""A whole training run: recipe, data, tokenizer, model, training, the measurement at the end, and the checkpoint.

A run's folder is taken once, and resumed only with the settings it was begun with.
"""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from accelerate import Accelerator
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers
from accelerate.utils import LoggerType, ProjectConfiguration, broadcast_object_list
from pydantic import ValidationError
from rich.console import Console

from headway_training.checkpoint import (
    HUGGINGFACE,
    IMAGE_EVALUATION_FILE,
    TEXT_EVALUATION_FILE,
    TOKENIZER_FILE,
    Checkpoint,
    Evaluation,
    TrainingRecord,
    is_model_folder,
    load_matching_weights,
    read_checkpoint,
    write_checkpoint,
)
from headway_training.contract import check_contract
from headway_training.data.checksums import Checksums
from headway_training.data.examples import Splits
from headway_training.data.sources import (
    OWN_LICENSE,
    OwnData,
    data_folder,
    find_unchecked_files,
    read_splits,
)
from headway_training.durable import replacing
from headway_training.errors import RecipeError, ResumeError, TrainingError
from headway_training.hardware import describe_hardware, free_threads, keep_freed_memory, library_versions
from headway_training.kinds import find_task
from headway_training.models import (
    ARCHITECTURES,
    Model,
    count_parameters,
)
from headway_training.models.own import FACTORY, MODULE, Factory, OwnModule, import_own, is_own
from headway_training.processes import agree, first_process_first
from headway_training.recipes import Recipe, parse_setting, read_recipe
from headway_training.sizing import Sizing, expected_throughput, size_up
from headway_training.state import latest_state
from headway_training.tasks import Task, make_task
from headway_training.tasks.generation import TOKENS_FILE
from headway_training.trainer import Trainer
from headway_training.unread import check_settings, find_unread_of_run, shows_attention

if TYPE_CHECKING:
    from headway_training.huggingface import FolderModel, ModelFolder

CHECKPOINT_FOLDER = "checkpoint"
RUN_FILE = "run.json"
_NO_TRACKER = "none"
_STATED = ("max_length", "window", "max_source_length", "max_target_length", "num_token_types", "mask_size")
"""What a module says of the texts it takes, and of the masks it makes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """Arguments of `headway-train run`."""

    recipe: str
    """Name of the recipe, or path of its file."""
    settings: tuple[str, ...] = ()
    """`section.key=value` on top of the recipe's."""
    data_dir: Path | None = None
    """Folder of the public data sets."""
    own_data: OwnData | None = None
    """The user's own files instead."""
    model: str | None = None
    """A named configuration in place of the recipe's model."""
    module: str | None = None
    """`package.module:function`, a factory of a module in its place; or `package.module`, which registers more."""
    init: Path | None = None
    """Folder to start from in place of the recipe's: of a checkpoint, or of a model of `transformers`."""
    output: Path | None = None
    """Folder of the run; None: `runs/<recipe>`."""
    seed: int = 0
    """Seed of everything that is random."""
    max_steps: int | None = None
    """Most optimizer steps; None: the recipe's."""
    resume: bool = False
    """Whether to go on with the run in `output`."""
    threads: int | None = None
    """Threads on the CPU; None: those that a resumed run had, or as many as cores are free."""

    @property
    def folder(self) -> Path:
        """Folder of the run."""
        return self.output or Path("runs") / Path(self.recipe).stem

    def command(self) -> str:
        """The command that trains this model again; folders of data sets and output are left out."""
        words = ["headway-train", "run", self.recipe]
        words += ["--model", self.model] if self.model is not None else []
        words += ["--module", self.module] if self.module is not None else []
        words += ["--init", str(self.init)] if self.init is not None else []
        if self.own_data is not None:
            words += ["--train", self.own_data.train, "--valid", self.own_data.valid]
            words += ["--test", self.own_data.test] if self.own_data.test else []
        for setting in self.settings:
            words += ["--set", setting]
        words += ["--seed", str(self.seed)] if self.seed else []
        words += ["--max-steps", str(self.max_steps)] if self.max_steps is not None else []
        return shlex.join(words)

    def read_recipe(self) -> Recipe:
        """The recipe with these options on top; own data gives the model a name of its own.

        Raises:
            RecipeError: As `read_recipe`; or a setting, or `data_dir`, is not read.
            CheckpointError: The checkpoint to start from cannot be read.
        """
        if self.own_data is not None and self.data_dir is not None:
            raise RecipeError("--data-dir holds public data sets, and the data is that of --train; leave one out")
        own = {parse_setting(setting)[0] for setting in self.settings}
        for flag, value, key in (
            ("--init", self.init, "init.checkpoint"),
            ("--max-steps", self.max_steps, "optimization.max_steps"),
        ):
            if value is not None and key in own:
                raise RecipeError(f"{flag} and --set {key} are both given; leave one out")
        settings = list(self.settings)
        if self.own_data is not None and "name" not in own:
            settings.append(f"name={json.dumps(self._model_name(self.own_data))}")
        folder = self.init if self.init is not None and is_model_folder(self.init) else None
        if self.init is not None and folder is None:
            settings.append(f"init.checkpoint={json.dumps(str(self.init))}")
        if self.max_steps is not None:
            settings.append(f"optimization.max_steps={self.max_steps}")
        factory = self._own_factory()
        named = [one for one in (self.model, factory, folder) if one is not None]
        replaced = {"attention"} if named else set()
        replaced |= {"data"} if self.own_data is not None else set()
        replaced |= {"tokenizer"} if self.init is not None or "init.checkpoint" in own else set()
        recipe = read_recipe(
            self.recipe, settings, configuration=self.model, model_folder=folder, factory=factory, replaced=replaced
        )
        if self.own_data is not None:
            recipe = recipe.noting(recipe.given - (set(find_task(recipe.task).of_data_sets) - own))
        check_settings(recipe, self.own_data)
        return recipe

    def _own_factory(self) -> str | None:
        """The factory that `module` names; a Python module alone is imported for what it registers.

        Raises:
            RecipeError: It cannot be imported.
        """
        if self.module is None or ":" in self.module:
            return self.module
        try:
            import_own(self.module)
        except ValueError as error:
            raise RecipeError(f"--module {error}") from error
        return None

    def _model_name(self, own: OwnData) -> str:
        """A name in a store, from the run's folder or from the recipe and the training data."""
        stem = Path(own.train.split(",")[0]).name.split(".")[0]
        words = self.folder.name if self.output is not None else f"{Path(self.recipe).stem}-{stem}"
        return re.sub(r"[^a-z0-9._-]+", "-", words.lower()).strip("._-")[:64].strip("._-") or "model"


def run_training(options: RunOptions, console: Console) -> Path:
    """Trains what the options say, and leaves a checkpoint.

    Returns:
        The folder of the checkpoint.

    Raises:
        TrainingError: Recipe, data, the checkpoint to start from or the run's folder cannot be used; the message says
            what to do.
    """
    recipe, folder = options.read_recipe(), options.folder
    described = _describe(options, recipe)
    stored = _check_folder(folder, described, find_unread_of_run(recipe, options.own_data), resume=options.resume)
    accelerator = _make_accelerator(options, recipe)
    checksums, note = _check_data(options, recipe, accelerator, stored)
    described |= {"data_sha256": checksums.whole} if checksums.files else {}
    if accelerator.device.type == "cpu":
        torch.set_num_threads(options.threads or (stored or {}).get("threads") or free_threads())
    described |= {"threads": torch.get_num_threads()}
    recipe, source = _open_folder(_open_module(recipe))
    splits, task = _read_data(options, recipe, accelerator, source)
    recipe = _describe_own(options, recipe, splits)
    try:
        sizing = _size_up(options, recipe, task, accelerator, source)
        model = _build(recipe, task, options.seed, source)
    except (TypeError, ValueError) as error:
        raise RecipeError(f"model: {error}") from error
    if is_own(model):
        check_contract(task, task.wrap(model), options.seed)
    if sizing.leaves_room and accelerator.device.type == "cpu":
        keep_freed_memory()
    start = _take_weights(recipe, model, task)  # of a resumed run too, whose state lacks what is not trained
    if latest_state(folder) is not None:
        start = ""
    trainer = Trainer(
        task=task,
        model=model,
        recipe=recipe,
        folder=folder,
        seed=options.seed,
        console=console,
        accelerator=accelerator,
        flops_per_unit=sizing.flops_per_unit,
    )
    if accelerator.is_main_process:
        checksums.write(folder)
        with replacing(folder / RUN_FILE) as file:
            file.write_text(json.dumps(described, indent=2) + "\n", encoding="utf-8")
        console.print(note + start + _introduction(recipe, splits, trainer, sizing), highlight=False)
    accelerator.init_trackers(
        recipe.name,
        config={name: str(value) for name, value in _flatten(described).items()},
        init_kwargs={"tensorboard": {"purge_step": trainer.progress.step + 1}},
    )
    try:
        trainer.fit()
        if accelerator.is_main_process:
            _finish(options, recipe, splits, trainer, console)
    finally:
        for tracker in accelerator.trackers:
            tracker.finish()
    agree()  # the first process measures, which may take long
    return folder / CHECKPOINT_FOLDER


def _make_accelerator(options: RunOptions, recipe: Recipe) -> Accelerator:
    """Finds the devices, and checks that the recipe's tracker can be used.

    Without an accelerator that is said to `accelerate`, whose processes on CPUs would not know of each other otherwise.

    Raises:
        RecipeError: It is unknown, or not installed.
    """
    tracker, on_cpu = recipe.tracker, not torch.accelerator.is_available()
    if tracker == _NO_TRACKER:
        return Accelerator(mixed_precision="no", cpu=on_cpu)
    if tracker not in LOGGER_TYPE_TO_CLASS:
        known = ", ".join([*sorted(LOGGER_TYPE_TO_CLASS), _NO_TRACKER])
        raise RecipeError(f"tracker is {tracker!r}; it must be one of {known}")
    if tracker in LoggerType.list() and tracker not in map(str, get_available_trackers()):
        raise RecipeError(f"tracker is {tracker!r}, which is not installed: install it, or set tracker={_NO_TRACKER}")
    project = ProjectConfiguration(project_dir=str(options.folder), logging_dir=str(options.folder / tracker))
    return Accelerator(mixed_precision="no", cpu=on_cpu, log_with=tracker, project_config=project)


def _read_data(
    options: RunOptions, recipe: Recipe, accelerator: Accelerator, source: ModelFolder | None
) -> tuple[Splits[Any], Task]:
    """Reads the data; tokenizer and tokens are written by the first process and read by the others."""
    if recipe.init.checkpoint is not None and source is None:
        read_checkpoint(recipe.init.checkpoint)  # a wrong folder is refused before any data is read
    with first_process_first():
        splits = read_splits(recipe, data_folder(options.data_dir), options.own_data)
        if accelerator.is_main_process and not options.resume:
            for name in (TOKENIZER_FILE, TOKENS_FILE):  # of a run that failed before it began
                (options.folder / name).unlink(missing_ok=True)
        return splits, make_task(recipe, splits, options.folder, source)


def _open_folder(recipe: Recipe) -> tuple[Recipe, ModelFolder | None]:
    """Reads the model folder that a recipe starts from, where it does; the recipe learns how that reads texts.

    Raises:
        CheckpointError: The folder cannot be used for the recipe's task.
        RecipeError: What reads such folders is not installed, or the recipe asks for longer texts than the model takes.
    """
    path = recipe.init.checkpoint
    if recipe.architecture != HUGGINGFACE or path is None:
        return recipe, None
    try:
        from headway_training.huggingface import open_folder  # noqa: PLC0415 (an extra, which folders alone need)
    except ModuleNotFoundError as error:
        raise RecipeError(f'{error}; install what folders need: pip install "headway-training[hf]"') from error
    asked = recipe.model.get("max_length")
    source = open_folder(path, recipe.task, None if asked is None else int(asked))
    fields: dict[str, Any] = {"architecture": HUGGINGFACE, "num_token_types": source.num_token_types}
    if source.max_length:
        fields["max_length"] = source.max_length
    return recipe.model_copy(update={"model": fields}), source


def _open_module(recipe: Recipe) -> Recipe:
    """Asks the module of the user's own that a recipe trains, where it does, how long texts it reads and writes.

    Raises:
        RecipeError: It cannot be made.
    """
    if recipe.architecture != MODULE:
        return recipe
    try:
        with torch.device("meta"):
            module = Factory(recipe.model[FACTORY]).build(recipe.configuration)
    except Exception as error:  # whatever its code raises
        raise RecipeError(f"--module {recipe.model[FACTORY]}: {error}") from error
    stated = {name: getattr(module, name) for name in _STATED if isinstance(getattr(module, name, None), int)}
    return recipe.model_copy(update={"model": {**stated, **recipe.model}})


def _size_up(
    options: RunOptions, recipe: Recipe, task: Task, accelerator: Accelerator, source: ModelFolder | None
) -> Sizing:
    """Counts what the run needs; a module of one's own that cannot be counted is told what it lacks.

    Raises:
        RecipeError: As `size_up`, or as `check_contract`.
    """
    try:
        return size_up(recipe, task, options.seed, accelerator.device, source)
    except TrainingError:
        raise
    except Exception:  # whatever the module's code raises
        if recipe.architecture == MODULE:
            check_contract(task, _build(recipe, task, options.seed, None), options.seed)
        raise


def _take_weights(recipe: Recipe, model: Model, task: Task) -> str:
    """Loads the weights that a fresh run starts from, where there are any, and says which."""
    path = recipe.init.checkpoint
    if path is None:
        return ""
    if recipe.architecture == HUGGINGFACE:
        return f"{cast('FolderModel', model).start}\n"
    into = model.module if isinstance(model, OwnModule) else model
    return f"weights of {path}: {load_matching_weights(into, path, task.labels).describe()}\n"


def _build(recipe: Recipe, task: Task, seed: int, source: ModelFolder | None) -> Model:
    """The model with fresh weights of the run's seed, or those of a folder.

    Raises:
        CheckpointError: The folder's cannot be taken.
        ValueError: The configuration is not a valid one.
    """
    torch.manual_seed(seed)
    if source is not None:
        return source.build(task.labels, multi_label=recipe.classification.multi_label, lora=recipe.lora)
    return task.build(recipe.model)


def _introduction(recipe: Recipe, splits: Splits[Any], trainer: Trainer, sizing: Sizing) -> str:
    """What is about to be trained, on what, with what memory and how fast."""
    device = trainer.accelerator.device
    bf16 = recipe.optimization.precision == "bf16"
    rate, how = expected_throughput(sizing, trainer.objective, bf16=bf16, device=device)
    return (
        f"{recipe.name}: {_describe_model(recipe, trainer.model)} on "
        f"{describe_hardware(device, trainer.accelerator.num_processes)}, {recipe.optimization.precision}; "
        f"{trainer.num_steps:,} steps\n"
        f"training data: {splits.train_name}; validation: {len(splits.valid):,} examples; test: {splits.test_name}\n"
        f"{''.join(note + chr(10) for note in trainer.task.notes)}"
        f"{sizing.describe()}\n"
        f"speed: about {rate:,.0f} {trainer.task.unit}/s a process ({how})"
    )


def _describe_model(recipe: Recipe, model: Model) -> str:
    """What is trained, in words."""
    count, whole = count_parameters(model), sum(parameter.numel() for parameter in model.parameters())
    if recipe.architecture != HUGGINGFACE:
        return f"{recipe.architecture} of {count:,} parameters"
    own = cast("FolderModel", model)
    trained = f", of which {count:,} are trained," if count < whole else ""
    return f"{own.kind} of {whole:,} parameters{trained}"


def _finish(options: RunOptions, recipe: Recipe, splits: Splits[Any], trainer: Trainer, console: Console) -> None:
    """Reads the test data, once, with the best weights; measures the baseline; writes the checkpoint."""
    task, model, progress = trainer.task, trainer.model.eval(), trainer.progress
    of_folder = cast("FolderModel", model) if recipe.architecture == HUGGINGFACE else None
    if of_folder is not None:
        of_folder.merge()  # so that what is measured is what is written
    console.print(f"best weights: step {progress.best_step:,}. Measuring on the test data, and the baseline ...")
    task.calibrate(model)
    record = TrainingRecord(
        recipe=Path(options.recipe).stem,
        command=options.command(),
        seed=options.seed,
        step_count=progress.step,
        epoch_count=round(trainer.num_epochs, 2),
        wall_time_s=round(progress.wall_time_s, 1),
        hardware=describe_hardware(trainer.accelerator.device, trainer.accelerator.num_processes),
        libraries=library_versions(),
        train_dataset=splits.train_name,
        train_example_count=task.num_train_examples,
        dataset_license=splits.license,
        dataset_home=splits.home,
        metrics=task.evaluate(model, "test"),
        baseline=task.measure_baseline(),
        history=tuple(progress.history),
    )
    evaluation = task.evaluation_data()
    kinds = (type(task), type(task.finished(model))) if recipe.architecture != MODULE and of_folder is None else ()
    checkpoint = Checkpoint(
        modules=tuple(dict.fromkeys(one.__module__ for one in kinds if is_own(one))),
        name=recipe.name,
        task=recipe.task,
        description=recipe.description,
        license=recipe.license,
        architecture=recipe.model["architecture"],
        configuration=task.model_section(recipe.model) if of_folder is None else of_folder.configuration,
        attention=recipe.attention and shows_attention(recipe.architecture),  # which --model may bring
        evaluation=Evaluation(
            file=TEXT_EVALUATION_FILE if evaluation.texts is not None else IMAGE_EVALUATION_FILE,
            dataset=splits.test_name,
            metric=task.evaluation_metric or task.metric,
            higher_is_better=task.higher_is_better,
        ),
        training=record,
        **task.checkpoint_fields(),
    )
    folder = options.folder / CHECKPOINT_FOLDER
    write_checkpoint(
        folder,
        checkpoint,
        task.finished(model),
        tokenizer=task.tokenizer,
        texts=evaluation.texts,
        images=evaluation.images,
        arrays=evaluation.arrays,
        write_weights=None if of_folder is None else of_folder.write,
    )
    measured = {f"test/{name}": value for name, value in record.metrics.items() if not isinstance(value, str)}
    trainer.accelerator.log(measured, step=progress.step)
    _report(record, folder, console)


def _report(record: TrainingRecord, folder: Path, console: Console) -> None:
    """Shows what was measured."""
    shown = {name: value if isinstance(value, str) else f"{value:.4g}" for name, value in record.metrics.items()}
    console.print(f"test: {'  '.join(f'{name} {value}' for name, value in shown.items())}", highlight=False)
    if record.baseline is not None:
        baseline = record.baseline
        console.print(f"baseline ({baseline.name}): {baseline.metric} {baseline.value:.4g}", highlight=False)
    console.print(f"{record.step_count:,} steps, {record.epoch_count} epochs, {record.wall_time_s:,.0f} s")
    console.print(f"export it with: headway-export {folder} --store models", highlight=False, soft_wrap=True)


def _describe_own(options: RunOptions, recipe: Recipe, splits: Splits[Any]) -> Recipe:
    """The recipe with a description and a licence that hold for the user's own data; what `--set` states stays.

    A licence in a recipe of the package is about its data set. One in a file of the user's is theirs, and that of a
    model folder is about its weights, as is that of a checkpoint that the run starts from.
    """
    own, stated = options.own_data, {parse_setting(setting)[0] for setting in options.settings}
    if own is None:
        return recipe
    changed = {"description": find_task(recipe.task).describe_own(own.train, splits.labels, own.train_name)}
    if not options.recipe.endswith(".toml") and recipe.architecture != HUGGINGFACE:
        start = recipe.init.checkpoint
        changed["license"] = OWN_LICENSE if start is None else read_checkpoint(start).license
    return recipe.model_copy(update={key: value for key, value in changed.items() if key not in stated})


def _describe(options: RunOptions, recipe: Recipe) -> dict[str, Any]:
    """What decides the result of a run, as it is kept in its folder."""
    return {
        "recipe": recipe.model_dump(mode="json", exclude={"result", "tracker"}),
        "seed": options.seed,
        "own_data": asdict(options.own_data) if options.own_data else None,
    }


def _check_data(
    options: RunOptions, recipe: Recipe, accelerator: Accelerator, stored: Mapping[str, Any] | None
) -> tuple[Checksums, str]:
    """Makes the checksums of the data, in the first process for all, and holds those of a run that is resumed to them.

    Args:
        options: Of the run.
        recipe: Its recipe.
        accelerator: Its processes.
        stored: What is kept of the run to resume; None: a new one begins.

    Returns:
        The checksums, and a note for the user, with its line end, where there is something to say.

    Raises:
        DataError: A file cannot be read.
        ResumeError: The data is not that of the run to resume.
    """
    made: list[Checksums | None] = [None]
    if accelerator.is_main_process:
        files = find_unchecked_files(recipe, data_folder(options.data_dir), options.own_data)
        made = [Checksums.of(files)]
    checksums = cast("Checksums", broadcast_object_list(made)[0])
    if stored is not None and "data_sha256" in stored:
        checksums.check(options.folder, stored["data_sha256"])
    elif stored is not None and checksums.files:
        return checksums, f"{options.folder} was begun by a version that kept no checksum: its data is not compared\n"
    return checksums, ""


def _check_folder(
    folder: Path, described: Mapping[str, Any], unread: Collection[str], *, resume: bool
) -> Mapping[str, Any] | None:
    """Checks that a folder is free for a run, or that the run in it is the one to resume.

    Args:
        folder: The run's.
        described: What decides its result.
        unread: Settings that decide nothing, which another version may have taken all the same.
        resume: Whether it is to be resumed.

    Returns:
        What is kept of the run to resume; None: there is none.

    Raises:
        ResumeError: There is a run and `resume` is off, there is none and it is on, or it is another one.
    """
    file = folder / RUN_FILE
    if not resume:
        if file.is_file():
            raise ResumeError(
                f"{folder} holds a run already. Go on with it by --resume, choose another folder with --output, "
                "or remove it"
            )
        return None
    if not file.is_file():
        raise ResumeError(f"{folder} holds no run to resume; leave --resume out to start one")
    stored = json.loads(file.read_text(encoding="utf-8"))
    before, after = (_flatten(_with_defaults(one)) | _flatten(one) for one in (stored, described))
    keys = (before.keys() | after.keys()) - {"data_sha256", "threads", *(f"recipe.{key}" for key in unread)}
    changed = sorted(key for key in keys if before.get(key) != after.get(key))
    if changed:
        shown = "; ".join(f"{key} was {before.get(key)!r} and is {after.get(key)!r}" for key in changed[:3])
        raise ResumeError(
            f"{folder} was begun with other settings: {shown}. Resume it with the same, or start a new run"
        )
    return cast("Mapping[str, Any]", stored)


def _with_defaults(described: Mapping[str, Any]) -> Mapping[str, Any]:
    """A description with the default of every setting that it lacks."""
    try:
        recipe = Recipe.model_validate(described["recipe"])
        known = ARCHITECTURES.get(recipe.architecture)  # of a folder or a module of one's own there are none
        fields = () if known is None else dataclasses.fields(known.configuration)
    except (KeyError, ValidationError):
        return described  # of settings that are not known: the comparison names them
    defaults = {field.name: field.default for field in fields if field.default is not dataclasses.MISSING}
    content = recipe.model_dump(mode="json", exclude={"result", "tracker"})
    return {**described, "recipe": {**content, "model": {**defaults, **content["model"]}}}


def _flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings by dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            flat |= _flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat
