"""`headway-export`: makes a bundle of a checkpoint, or of a module of your own."""

from __future__ import annotations

import logging
import signal
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from pydantic import ValidationError
from rich.console import Console
from rich.table import Table
from typer.core import TyperGroup

from headway_export.errors import ExportError, SourceError
from headway_export.requirements import check_given, check_own
from headway_server.bundles import (
    CHAT_TEMPLATE_FILE,
    Bundle,
    ImagePreprocessing,
    Languages,
    Precision,
    SpecialTokens,
    Variant,
    new_place,
    remove_held,
    remove_left,
)
from headway_server.bundles.tags import Aggregation, TagScheme
from headway_server.errors import ServerError

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

    from headway_export.exporter import ExportOptions
    from headway_export.source import ExportSource

# Commands import what they need when they run: torch and onnx take seconds to load, and --help needs neither.

_ENDING = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGHUP") if hasattr(signal, name))
"""Signals that tell a program to end."""
_COMMAND = "checkpoint"
"""The command that is meant where none is named."""


class _Commands(TyperGroup):
    """Commands, of which `headway-export CHECKPOINT` need not name its own."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Puts the name of the command before arguments that begin with none."""
        named = bool(args) and (args[0] in self.commands or args[0] == "--help")
        return super().parse_args(ctx, args if named else [_COMMAND, *args])


app = typer.Typer(
    cls=_Commands,
    add_completion=False,  # its flags would be taken for those of the command that is meant where none is named
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Exports models to bundles, each proved to compute the same function. CHECKPOINT, or --model, may be given "
    "without naming the command checkpoint.",
)
_console = Console(stderr=True)


_Store = Annotated[Path, typer.Option(help="Folder of bundles to write into.")]
_Version = Annotated[str, typer.Option(help="Version of the model in the store.")]
_Replace = Annotated[bool, typer.Option("--replace", help="Replace that version if it exists.")]
_Description = Annotated[str, typer.Option(help="One sentence about the model.")]
_License = Annotated[str, typer.Option("--license", help="Licence of the weights.")]
_Texts = Annotated[
    Path | None,
    typer.Option(
        "--texts",
        help="Texts, a line each, that int8 and int4 are held against fp32 on where there is no --evaluation. "
        "[default: drawn ones]",
    ),
]
_Images = Annotated[
    Path | None, typer.Option("--images", help="Folder of images in place of --texts, for a model that reads such.")
]
_Audio = Annotated[
    Path | None, typer.Option("--audio", help="Folder of recordings in place of --texts, for a model that hears.")
]

_MaxSizes = Annotated[
    list[str] | None,
    typer.Option(
        metavar="AXIS=SIZE", help="Limit of a dynamic axis, which a server checks and warms up at; repeat for several."
    ),
]
_MOST_SIZE = 2**24
_TagScheme = Annotated[
    TagScheme | None,
    typer.Option(
        "--tag-scheme",
        help="Scheme of a token classifier's labels (docs/spans.md). [default: iob2; of a folder, by their names]",
        show_default=False,
    ),
]
_Aggregation = Annotated[
    Aggregation | None,
    typer.Option(
        "--aggregation",
        help="How a token classifier's spans are found. [default: sequence; of a model folder, first]",
        show_default=False,
    ),
]

_CHECKPOINT_PARAMETERS = {
    "checkpoint",
    "store",
    "name",
    "version",
    "precision",
    "cache",
    "attention",
    "replace",
    "task",
}
"""Parameters that go with CHECKPOINT; all others describe --model, and a checkpoint holds what they give."""


@app.command(_COMMAND)
def main(
    context: typer.Context,
    checkpoint: Annotated[
        Path | None, typer.Argument(help="Folder of a checkpoint; headway-train writes one into <run>/checkpoint.")
    ] = None,
    store: _Store = Path("models"),
    name: Annotated[
        str | None, typer.Option(help="Name of the model in the store. [default: the checkpoint's]")
    ] = None,
    version: _Version = "1",
    precision: Annotated[
        list[Precision] | None,
        typer.Option(
            help="Variant to write; repeat for several. [default: fp32, int8, fp16; without data to judge them: fp32]"
        ),
    ] = None,
    cache: Annotated[
        Literal["int8", "fp32"], typer.Option(help="Key/value cache of a decoder's int8 and int4 variants.")
    ] = "int8",
    attention: Annotated[
        bool | None,
        typer.Option(
            help="Write the graph of the attention weights too (docs/attention.md). [default: the checkpoint's]",
            show_default=False,
        ),
    ] = None,
    replace: _Replace = False,
    task: Annotated[
        str | None, typer.Option(help="Task of --model. With CHECKPOINT: refuse one of another task.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="Your own module as package.module:function (docs/bring-your-own.md). "
            "It needs --weights, --task and --name, and takes the options below."
        ),
    ] = None,
    weights: Annotated[Path | None, typer.Option(help="Weights of --model, a safetensors file.")] = None,
    tokenizer: Annotated[Path | None, typer.Option(help="tokenizer.json; for text.")] = None,
    pad_token: Annotated[str | None, typer.Option(help="Token of --tokenizer that fills up a batch.")] = None,
    bos_token: Annotated[str | None, typer.Option(help="Token of --tokenizer that a translation starts from.")] = None,
    eos_token: Annotated[str | None, typer.Option(help="Token of --tokenizer that ends a text.")] = None,
    unk_token: Annotated[str | None, typer.Option(help="Token of --tokenizer for what it does not know.")] = None,
    chat_template: Annotated[
        Path | None,
        typer.Option(help="Jinja file, or tokenizer_config.json, with a chat template; for generation."),
    ] = None,
    labels: Annotated[str | None, typer.Option(help="Labels in the order of the outputs, with commas between.")] = None,
    multi_label: Annotated[
        bool, typer.Option("--multi-label", help="Several labels may apply to a text; for text_classification.")
    ] = False,
    text_pairs: Annotated[
        Literal["never", "optional", "required"],
        typer.Option(help="When two texts are read as one input; for text_classification."),
    ] = "never",
    tag_scheme: _TagScheme = None,
    aggregation: _Aggregation = None,
    languages: Annotated[str | None, typer.Option(help="Source and target, such as en-de; for translation.")] = None,
    preprocessing: Annotated[
        Path | None, typer.Option(help="JSON file with a bundle's image_preprocessing; for images.")
    ] = None,
    evaluation: Annotated[
        Path | None, typer.Option(help="Data that int8, int4 and fp16 are judged on (docs/checkpoint.md).")
    ] = None,
    texts: _Texts = None,
    images: _Images = None,
    audio: _Audio = None,
    description: _Description = "",
    license_name: _License = "not stated",
) -> None:
    """Export CHECKPOINT, or a module of your own with --model, and prove that the export computes the same function."""
    with _reporting(exit_code=1):
        if (checkpoint is None) == (model is None):
            raise SourceError("give either CHECKPOINT or --model")
        if checkpoint is not None:
            _check_flags_of_checkpoint(context)
        if model is not None:
            check_given(
                model,
                {
                    "--weights": weights,
                    "--task": task,
                    "--name": name,
                    "--tokenizer": tokenizer,
                    "--labels": labels,
                    "--languages": languages,
                    "--preprocessing": preprocessing,
                    "--chat-template": chat_template,
                    "--evaluation": evaluation,
                    "--texts": texts,
                    "--images": images,
                    "--audio": audio,
                },
            )

        from headway_export.exporter import ExportOptions  # noqa: PLC0415 (see above)
        from headway_export.given import GivenInputs  # noqa: PLC0415
        from headway_export.source import from_factory, make_tagging  # noqa: PLC0415

        if checkpoint is not None:
            sources = _sources_of(checkpoint, name)
            found = " and ".join(source.task for source in sources)
            sources = tuple(source for source in sources if task in (None, source.task))
            if not sources:
                raise SourceError(f"{checkpoint}: is of task {found}, and --task {task} was asked for")
        else:
            assert model is not None, "one of the two is given"
            assert weights is not None, "`check_given` demands it"
            assert task is not None, "likewise"
            assert name is not None, "likewise"
            tokens = {"pad": pad_token, "bos": bos_token, "eos": eos_token, "unk": unk_token}
            own = from_factory(
                model,
                weights,
                task=task,
                name=name,
                tokenizer_file=tokenizer,
                special_tokens=_special_tokens(tokenizer, tokens),
                chat_template_file=chat_template,
                labels=[label.strip() for label in labels.split(",")] if labels else (),
                multi_label=multi_label,
                text_pairs=text_pairs,
                tagging=make_tagging(tag_scheme, aggregation) if tag_scheme or aggregation else None,
                image_preprocessing=_preprocessing(preprocessing) if preprocessing else None,
                languages=_languages(languages) if languages else None,
                evaluation_file=evaluation,
                description=description,
                license_name=license_name,
            )
            sources = GivenInputs(texts=texts, images=images, audio=audio).add_to((own,))
        for source in sources:
            options = ExportOptions(
                store=store,
                version=version,
                precisions=_precisions(precision, source),
                cache=cache,
                attention=attention,
                replace=replace,
            )
            _export(source, options)


@app.command()
def hf(
    folder: Annotated[
        str,
        typer.Argument(
            metavar="FOLDER|ORG/NAME[@REVISION]",
            help="Model folder of Hugging Face transformers, or the id of one on the hub, which is fetched.",
        ),
    ],
    store: _Store = Path("models"),
    name: Annotated[
        str | None, typer.Option(help="Name of the model in the store. [default: the folder's, in small letters]")
    ] = None,
    version: _Version = "1",
    precision: Annotated[
        list[Precision] | None,
        typer.Option(
            help="Variant to write; repeat for several. [default: fp32; with data to judge it, int8 too; for weights "
            "that came in 4 bits, int4]"
        ),
    ] = None,
    cache: Annotated[
        Literal["int8", "fp32"], typer.Option(help="Key/value cache of a decoder's int8 and int4 variants.")
    ] = "int8",
    attention: Annotated[
        bool,
        typer.Option("--attention", help="Write the graph of the attention weights too (docs/attention.md)."),
    ] = False,
    replace: _Replace = False,
    task: Annotated[str | None, typer.Option(help="Task, where the folder does not tell it.")] = None,
    revision: Annotated[
        str | None, typer.Option(help="Branch, tag or commit of an id. [default: the hub's default branch]")
    ] = None,
    max_length: Annotated[
        int | None, typer.Option(min=8, help="Most tokens of a text. [default: the model's, 2048 at most]")
    ] = None,
    allow_pickle: Annotated[
        bool,
        typer.Option(
            "--allow-pickle",
            help="Take pickled weights where there are no safetensors. A pickle may run any code when it is read: "
            "give it for models whose makers you trust.",
        ),
    ] = False,
    trust_remote_code: Annotated[bool, typer.Option("--trust-remote-code", hidden=True)] = False,
    evaluation: Annotated[
        Path | None, typer.Option(help="Data that int8 and int4 are judged on (docs/checkpoint.md).")
    ] = None,
    languages: Annotated[
        str | None, typer.Option(help="Source and target, such as en-de, where the folder does not tell them.")
    ] = None,
    license_name: Annotated[
        str | None, typer.Option("--license", help="Licence of the weights. [default: what the folder's README states]")
    ] = None,
    texts: _Texts = None,
    images: _Images = None,
    audio: _Audio = None,
    base: Annotated[
        str | None,
        typer.Option(
            help="Folder or id of the model that an adapter is merged into. [default: what the adapter names]"
        ),
    ] = None,
    pooling: Annotated[
        str | None,
        typer.Option(help="How an encoder's token vectors become one, such as cls, mean, max or last; for embeddings."),
    ] = None,
    tag_scheme: _TagScheme = None,
    aggregation: _Aggregation = None,
    examples: Annotated[
        Path | None,
        typer.Option(help=".npz of inputs by name that the model runs on; with --task tensors. [default: drawn]"),
    ] = None,
    axes: Annotated[
        list[str] | None,
        typer.Option(
            metavar="INPUT=AXIS,AXIS",
            help="Axes of an input, sizes of fixed ones and names of others; repeat for several; with --task tensors.",
        ),
    ] = None,
    vocoder: Annotated[
        str | None,
        typer.Option(
            help="Folder or id of the model that makes samples of spectrograms; for a speaker that writes these. "
            "[default: the folder vocoder in FOLDER]"
        ),
    ] = None,
    voices: Annotated[
        Path | None,
        typer.Option(
            help="Folder of x-vectors, .npy or .safetensors; for a speaker that writes spectrograms. "
            "[default: the folder speaker_embeddings in FOLDER]"
        ),
    ] = None,
    prompt: Annotated[
        list[str] | None,
        typer.Option(help="NAME=TEXT, which a call can have put before its texts; repeat for several; for embeddings."),
    ] = None,
) -> None:
    """Export a model of Hugging Face transformers, and prove that the export computes the same function."""
    with _reporting(exit_code=2), _scratch_in(store) as scratch:
        from headway_export.exporter import ExportOptions  # noqa: PLC0415 (see above)
        from headway_export.given import GivenInputs, flag_of  # noqa: PLC0415
        from headway_export.source import has_metric  # noqa: PLC0415
        from headway_export.tasks.table import task_of  # noqa: PLC0415

        if trust_remote_code:
            raise SourceError(
                "--trust-remote-code: code that comes with a model is never run; a model whose family the installed "
                "transformers knows needs none, and any other can be given as a module of your own "
                "(docs/bring-your-own.md)"
            )
        huggingface = _huggingface()
        asked = huggingface.FolderOptions(
            name=name,
            task=task,
            max_length=max_length,
            allow_pickle=allow_pickle,
            evaluation_file=evaluation,
            languages=_languages(languages) if languages else None,
            license_name=license_name,
            given=GivenInputs(texts=texts, images=images, audio=audio),
            pooling=pooling,
            tag_scheme=tag_scheme,
            aggregation=aggregation,
            prompts=_prompts(prompt or ()),
            examples=examples,
            axes=_axes(axes or ()),
            vocoder=vocoder,
            voices=voices,
            base=base,
            precisions=tuple(precision) if precision else None,
            scratch=scratch,
        )
        on_hub = None if Path(folder).exists() else huggingface.parse_id(folder, revision)
        if on_hub is not None:
            sources, notes = huggingface.sources_from_hub(*on_hub, asked, _say)
        elif revision is not None:
            raise SourceError(f"--revision {revision}: is for an id of the hub, ORG/NAME, and {folder} is none")
        else:
            sources, notes = huggingface.sources_from_folder(Path(folder), asked, _say)
        is_judged = all(source.evaluation is not None or source.texts_name for source in sources)
        default = [Precision.FP32, Precision.INT8] if is_judged else [Precision.FP32]
        if any(source.kept for source in sources):  # as they came
            default = [Precision.INT4]
        options = ExportOptions(
            store=store,
            version=version,
            precisions=tuple(dict.fromkeys(precision or default)),
            cache=cache,
            attention=attention,
            replace=replace,
        )
        for source in sources:
            with huggingface.in_a_sentence(folder):
                _export(source, options)
        has_others = sources[0].task != "tensors" and task_of(sources[0].task).only_in_fp32 is None
        if precision is None and default == [Precision.FP32] and has_others:
            note = (
                "fp32 alone: int8 is judged "
                + ("on evaluation data, which --evaluation FILE gives, or " if has_metric(sources[0]) else "")
                + f"by fp32's answers to inputs that {flag_of(sources[0])} gives, or to drawn ones with --precision "
                "fp32 --precision int8"
            )
            notes += (note,)
        for note in notes:
            Console().print(f"note: {note}", markup=False, highlight=False, soft_wrap=True)


@app.command()
def onnx(
    file: Annotated[Path, typer.Argument(help="ONNX file of any model; its external data is beside it.")],
    store: _Store = Path("models"),
    name: Annotated[
        str | None, typer.Option(help="Name of the model in the store. [default: the file's, in small letters]")
    ] = None,
    version: _Version = "1",
    batch_axis: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|NUMBER|none",
            help="Dimension of the batch, on which calls are joined; several names with commas if inputs differ. "
            "[default: the inputs' first, if its rows are independent]",
        ),
    ] = None,
    examples: Annotated[
        Path | None,
        typer.Option(help=".npz of inputs to try it on, and of outputs to compare. [default: drawn inputs]"),
    ] = None,
    max_size: _MaxSizes = None,
    replace: _Replace = False,
    description: _Description = "",
    license_name: _License = "not stated",
) -> None:
    """Take an ONNX FILE of any model as it is, tried and proved; it answers named tensors."""
    with _reporting(exit_code=2):
        from headway_export.onnx_file import OnnxOptions, source_from_onnx  # noqa: PLC0415 (see above)

        options = OnnxOptions(
            name=name,
            batch_axis=batch_axis,
            examples=examples,
            max_sizes=_sizes(max_size or ()),
            description=description,
            license_name=license_name,
        )
        _export_tensors(*source_from_onnx(file, options), store, version, replace=replace)


@app.command()
def tensors(
    model: Annotated[
        str,
        typer.Option(help="Your module and its example inputs as package.module:function (docs/bring-your-own.md)."),
    ],
    store: _Store = Path("models"),
    name: Annotated[
        str | None, typer.Option(help="Name of the model in the store. [default: the function's module's]")
    ] = None,
    version: _Version = "1",
    weights: Annotated[
        Path | None, typer.Option(help="Weights of the module, a safetensors file. [default: the function's]")
    ] = None,
    max_size: _MaxSizes = None,
    replace: _Replace = False,
    description: _Description = "",
    license_name: _License = "not stated",
) -> None:
    """Trace a module with named inputs and outputs, and prove it; it answers named tensors."""
    with _reporting(exit_code=2):
        check_own(model)

        from headway_export.onnx_file import name_of_model  # noqa: PLC0415 (see above)
        from headway_export.torch_module import source_from_tensors  # noqa: PLC0415

        source, notes = source_from_tensors(
            model,
            weights=weights,
            name=name or name_of_model(model.partition(":")[0].rpartition(".")[2], f"--model {model}"),
            max_sizes=_sizes(max_size or ()),
            description=description,
            license_name=license_name,
        )
        _export_tensors(source, notes, store, version, replace=replace)


def _export_tensors(source: ExportSource, notes: Sequence[str], store: Path, version: str, *, replace: bool) -> None:
    from headway_export.exporter import ExportOptions  # noqa: PLC0415 (see above)

    _export(source, ExportOptions(store=store, version=version, precisions=(Precision.FP32,), replace=replace))
    for note in notes:
        Console().print(f"note: {note}", markup=False, highlight=False, soft_wrap=True)


def _sizes(given: Sequence[str]) -> dict[str, int]:
    sizes = {}
    for entry in given:
        axis, separator, size = entry.rpartition("=")
        if not (axis and separator and size.isdecimal() and 0 < int(size) <= _MOST_SIZE):
            raise SourceError(f"--max-size {entry}: give it as AXIS=SIZE, such as length=512, from 1 to {_MOST_SIZE}")
        sizes[axis] = int(size)
    return sizes


def _axes(given: Sequence[str]) -> dict[str, tuple[int | str, ...]]:
    """Reads `--axes` of models of tensors."""
    found: dict[str, tuple[int | str, ...]] = {}
    for entry in given:
        name, separator, axes = entry.partition("=")
        parts = axes.split(",")
        if not (name and separator and all(part.isidentifier() or (part.isdecimal() and int(part)) for part in parts)):
            raise SourceError(f"--axes {entry}: give it as INPUT=AXIS,AXIS, such as pixel_values=batch,3,224,224")
        found[name] = tuple(int(part) if part.isdecimal() else part for part in parts)
    return found


@contextmanager
def _scratch_in(store: Path) -> Iterator[Path]:
    """Yields a folder that is made once something is written there, and removed at the end."""
    remove_left(store)
    folder = new_place(store)
    try:
        yield folder
    finally:
        remove_held(folder)


def _huggingface() -> ModuleType:
    """The package that reads model folders, which needs an extra."""
    try:
        from headway_export import huggingface  # noqa: PLC0415 (see above)
    except ModuleNotFoundError as error:
        raise SourceError(f'{error}; install what this command needs: pip install "headway-export[hf]"') from error
    return huggingface


def _sources_of(checkpoint: Path, name: str | None) -> tuple[ExportSource, ...]:
    """What a checkpoint holds: a model of the kit, or a fine-tuned model folder."""
    from headway_export.source import checkpoint_beside, sources_from_checkpoint  # noqa: PLC0415 (see above)

    if checkpoint_beside(checkpoint) is None:
        return sources_from_checkpoint(checkpoint, name=name)
    huggingface = _huggingface()
    source, notes = huggingface.from_folder(checkpoint, huggingface.FolderOptions(name=name))
    for note in notes:
        Console().print(f"note: {note}", markup=False, highlight=False, soft_wrap=True)
    return (source,)


def _prompts(given: Sequence[str]) -> tuple[tuple[str, str], ...]:
    pairs = [entry.partition("=") for entry in given]
    for entry, (name, separator, _) in zip(given, pairs, strict=True):
        if not (name and separator):
            raise SourceError(f"--prompt {entry}: give it as NAME=TEXT, such as query='query: '")
    return tuple((name, text) for name, _, text in pairs)


def _say(sentence: str) -> None:
    _console.print(sentence, markup=False, highlight=False, soft_wrap=True)


@contextmanager
def _reporting(*, exit_code: int) -> Iterator[None]:
    """Ends the program with a sentence and no traceback if what is exported cannot be, or if it is told to end.

    Told by a signal, it removes what it has written first.
    """
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)  # it warns of optional packages that are not needed
    warnings.filterwarnings("ignore", module=r"torch\..*")
    try:
        with _ending_by_signals():
            yield
    except _ToldToEndError as told:
        _complain(f"stopped by {told.signal.name}; no unfinished version is left in the store")
        raise typer.Exit(128 + told.signal) from None
    except (ExportError, ServerError, ValidationError, OSError) as error:
        _complain(_message(error))
        raise typer.Exit(exit_code) from None


def _complain(sentence: str) -> None:
    _console.print(f"headway-export: {sentence}", style="red", markup=False, highlight=False, soft_wrap=True)


class _ToldToEndError(BaseException):
    """A signal has told the program to end. No `Exception`, which code of others might hold back."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.signal = signal.Signals(number)


@contextmanager
def _ending_by_signals() -> Iterator[None]:
    """Raises `_ToldToEndError` where the program is when a signal tells it to end; further ones are ignored then."""

    def end(number: int, _: object) -> None:
        for each in before:
            signal.signal(each, signal.SIG_IGN)  # what was written is being removed
        raise _ToldToEndError(number)

    is_main = threading.current_thread() is threading.main_thread()  # others may not handle signals
    before = {one: signal.signal(one, end) for one in _ENDING if is_main}
    try:
        yield
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)


def _export(source: ExportSource, options: ExportOptions) -> None:
    from headway_export.exporter import export  # noqa: PLC0415 (see above)

    with _console.status("") as status:
        bundle = export(source, options, progress=status.update)
    _print_summary(bundle)


def _check_flags_of_checkpoint(context: typer.Context) -> None:
    """Checks that no flag of --model is given with CHECKPOINT.

    Raises:
        SourceError: One is.
    """
    given = [
        parameter.opts[0]
        for parameter in context.command.params
        if parameter.name not in _CHECKPOINT_PARAMETERS
        and (source := context.get_parameter_source(str(parameter.name))) is not None
        and source.name == "COMMANDLINE"
    ]
    if given:
        raise SourceError(
            f"{', '.join(given)}: only for --model, and CHECKPOINT was given, which holds these things itself; leave "
            "them out, or give --model in place of CHECKPOINT"
        )


def _precisions(asked: list[Precision] | None, source: ExportSource) -> tuple[Precision, ...]:
    from headway_export.exporter import DEFAULT_PRECISIONS  # noqa: PLC0415 (see above)

    if asked:
        return tuple(dict.fromkeys(asked))
    return DEFAULT_PRECISIONS if source.evaluation is not None or source.texts_name else (Precision.FP32,)


def _special_tokens(tokenizer_file: Path | None, tokens: dict[str, str | None]) -> SpecialTokens | None:
    """Looks up the ids of the tokens that were named."""
    from headway_export.source import open_tokenizer  # noqa: PLC0415 (see above)

    named = {kind: token for kind, token in tokens.items() if token is not None}
    if tokenizer_file is None:
        if named:
            flags = ", ".join(f"--{kind}-token" for kind in named)
            raise SourceError(f"{flags}: names a token of --tokenizer; give --tokenizer too")
        return None
    tokenizer = open_tokenizer(tokenizer_file)
    ids: dict[str, int] = {}
    for kind, token in named.items():
        index = tokenizer.token_to_id(token)
        if index is None:
            raise SourceError(f"--{kind}-token {token}: {tokenizer_file} has no such token")
        ids[kind] = index
    return SpecialTokens.model_validate(ids)


def _preprocessing(file: Path) -> ImagePreprocessing:
    try:
        return ImagePreprocessing.model_validate_json(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        why = _message(error)
        raise SourceError(f"{file}: cannot be read as image_preprocessing ({why}); see docs/bundle.md") from error


def _languages(pair: str) -> Languages:
    source, separator, target = pair.partition("-")
    if not (source and separator and target):
        raise SourceError(f"--languages {pair}: give source and target as BCP 47 codes, such as en-de")
    return Languages(source=source, target=target)


def _message(error: Exception) -> str:
    if isinstance(error, ValidationError):
        return "; ".join(": ".join(filter(None, (_place(item), item["msg"]))) for item in error.errors())
    return str(error)


def _place(item: ErrorDetails) -> str:
    return ".".join(map(str, item["loc"]))


def _agreement(variant: Variant) -> str:
    if variant.agreement is None:
        return "not measured"
    return ", ".join(f"{name} {value:.4f}" for name, value in variant.agreement.figures.items())


def _print_summary(bundle: Bundle) -> None:
    from headway_export.tasks.table import task_of  # noqa: PLC0415 (see above)

    manifest = bundle.manifest
    table = Table(title=f"{manifest.name}/{manifest.version}  ({manifest.task})", title_justify="left")
    words = task_of(manifest.task).words_of_error
    for column in ("variant", "size", words, "greedy tokens that differ", "metric"):
        table.add_column(column)
    for precision, variant in manifest.variants.items():
        files = (name for name in manifest.files if name.startswith(f"{precision}/"))
        size = sum(manifest.files[name].size_bytes for name in files)
        parity, quality = variant.parity, variant.quality
        table.add_row(
            precision,
            f"{size / 1e6:.2f} MB",
            f"{parity.max_relative_logit_error:.1e}",
            f"{parity.greedy_mismatch_count} of {parity.greedy_token_count}" if parity.greedy_token_count else "-",
            f"{quality.metric} {quality.value:.3f}" if quality else _agreement(variant),
        )
    console = Console()
    console.print(table)
    for line in task_of(manifest.task).summary(manifest):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    if CHAT_TEMPLATE_FILE in manifest.files:
        console.print("has a chat template: a request may give a conversation instead of a prompt", highlight=False)
    console.print(f"wrote {bundle.path}", highlight=False, soft_wrap=True)
