"""The commands that classify, embed and score texts, images and audio."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from headway_client.cli.calls import print_answers, read_images
from headway_client.cli.flags import (
    AsJson,
    AudioArguments,
    BatchSize,
    ConnectionFlags,
    File,
    ImageArguments,
    TextArguments,
    connected,
    takes_options,
)
from headway_client.cli.output import print_heading, print_table, read_inputs
from headway_client.cli.pages import read_pages
from headway_client.options import (
    ClassifyAudioOptions,
    ClassifyImageOptions,
    ClassifyTextOptions,
    ClassifyTokensOptions,
    ClassifyVideoOptions,
    EmbedImageOptions,
    EmbedTextOptions,
    ScoreTextOptions,
)
from headway_client.results import (
    Answer,
    AudioClassification,
    ImageClassification,
    ImageEmbedding,
    TextClassification,
    TextEmbedding,
    TextScore,
    TokenClassification,
    VideoClassification,
)

Pairs = Annotated[bool, typer.Option("--pairs", help="Each input is two texts separated by a tab.")]

Pages = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Pages in place of texts: objects of JSON with words, boxes, width and height, or Tesseract's TSV; "
        "- is stdin.",
    ),
]

_MOST_PAGES = 8
"""Pages of a call, of which the server reads 7,000 words in all."""
_SHOWN_LABELS = 3
"""Labels printed without --top-k."""


@takes_options
def classify_text(
    texts: TextArguments = None,
    *,
    file: File = None,
    pairs: Pairs = False,
    batch_size: BatchSize = 32,
    as_json: AsJson = False,
    options: ClassifyTextOptions,
    connection: ConnectionFlags,
) -> None:
    """Label texts.

    Prints labels with probabilities, a tab, the text. --top-k sets the number of labels (default: 3). --json also tells
    which labels apply.
    """
    inputs = read_inputs(texts, file)
    with connected(connection) as client:

        def call(batch: list[str]) -> Answer[TextClassification]:
            first, options["text_pairs"] = split_pairs(batch, pairs)
            return client.classify_text(first, **options)

        print_answers(
            inputs,
            batch_size,
            call,
            None if as_json else lambda text, result: _show_labels(text, result, options.get("top_k")),
        )


@takes_options
def classify_tokens(
    texts: TextArguments = None,
    *,
    file: File = None,
    pages: Pages = None,
    batch_size: BatchSize = 32,
    as_json: AsJson = False,
    options: ClassifyTokensOptions,
    connection: ConnectionFlags,
) -> None:
    """Find labelled spans in texts, such as names or parts of speech, or in the words of pages.

    Prints a line for each span: start, end, label, probability, text. Start and end of a page's span number its words.
    """
    if pages is not None and (texts or file is not None):
        raise typer.BadParameter("--pages is in place of texts and --file; give one of them")
    with connected(connection) as client:
        by_name = {} if pages is None else read_pages(pages)
        inputs = read_inputs(texts, file) if pages is None else by_name

        def call(batch: list[str]) -> Answer[TokenClassification]:
            if pages is None:
                return client.classify_tokens(batch, **options)
            options["pages"] = [by_name[name] for name in batch]
            return client.classify_tokens(**options)

        def show(name: str, result: TokenClassification) -> None:
            text = by_name[name].text if by_name else name
            if pages is not None or file is not None or len(texts or ()) != 1:
                print_heading(name)
            rows = ((one.words or one.span, one) for one in result.spans)
            print_table(
                [
                    (str(span.start), str(span.end), one.label, f"{one.probability:.3f}", one.span.of(text))
                    for span, one in rows
                ]
            )

        size = batch_size if pages is None else min(batch_size, _MOST_PAGES)
        print_answers(inputs, size, call, None if as_json else show)


@takes_options
def classify_image(
    images: ImageArguments = None,
    *,
    file: File = None,
    batch_size: BatchSize = 8,
    as_json: AsJson = False,
    options: ClassifyImageOptions,
    connection: ConnectionFlags,
) -> None:
    """Label image files or prepared images.

    Prints labels with probabilities, a tab, the file or id. --top-k sets the number of labels (default: 3).
    """
    inputs, arguments = read_images(images, file, options)
    with connected(connection) as client:
        print_answers(
            inputs,
            batch_size,
            lambda batch: client.classify_image(**arguments(batch), **options),
            None if as_json else lambda path, result: _show_labels(path, result, options.get("top_k")),
        )


@takes_options
def classify_audio(
    audios: AudioArguments = None,
    *,
    file: File = None,
    batch_size: BatchSize = 4,
    as_json: AsJson = False,
    options: ClassifyAudioOptions,
    connection: ConnectionFlags,
) -> None:
    """Label audio: WAV, FLAC, OGG or MP3 files.

    Prints labels with probabilities, a tab, the file. --top-k sets the number of labels (default: 3).
    """
    inputs = read_inputs(audios, file)
    with connected(connection) as client:
        print_answers(
            inputs,
            batch_size,
            lambda batch: client.classify_audio([Path(path) for path in batch], **options),
            None if as_json else lambda path, result: _show_labels(path, result, options.get("top_k")),
        )


@takes_options
def classify_video(
    frames: Annotated[
        list[Path], typer.Argument(metavar="FRAMES...", help="Frames as image files in order, or a folder of them.")
    ],
    *,
    as_json: AsJson = False,
    options: ClassifyVideoOptions,
    connection: ConnectionFlags,
) -> None:
    """Label a video, given as its frames.

    Files of a folder are taken in the order of their names. Prints labels with probabilities, a tab, the folder or the
    first file. --top-k sets the number of labels (default: 3).
    """
    files = [file for path in frames for file in (sorted(path.iterdir()) if path.is_dir() else [path])]
    with connected(connection) as client:
        print_answers(
            iter([str(frames[0])]),
            1,
            lambda _: client.classify_video(files, **options),
            None if as_json else lambda path, result: _show_labels(path, result, options.get("top_k")),
        )


@takes_options
def embed_text(
    texts: TextArguments = None,
    *,
    file: File = None,
    pairs: Pairs = False,
    batch_size: BatchSize = 32,
    as_json: AsJson = False,
    options: EmbedTextOptions,
    connection: ConnectionFlags,
) -> None:
    """Embed texts.

    Prints the vector's values separated by spaces, a tab, the text; of a sparse one each value after its index. With
    --multi-vector prints a line for each token: its values, a tab, the token.
    """
    inputs = read_inputs(texts, file)
    with connected(connection) as client:

        def call(batch: list[str]) -> Answer[TextEmbedding]:
            first, options["text_pairs"] = split_pairs(batch, pairs)
            return client.embed_text(first, **options)

        print_answers(inputs, batch_size, call, None if as_json else _show_vector)


@takes_options
def score_text(
    texts: TextArguments = None,
    *,
    file: File = None,
    pairs: Pairs = False,
    query: Annotated[str | None, typer.Option(help="Query that is paired with each input.")] = None,
    batch_size: BatchSize = 32,
    as_json: AsJson = False,
    options: ScoreTextOptions,
    connection: ConnectionFlags,
) -> None:
    """Score texts, or pairs of texts.

    Prints the score, a tab, the text.
    """
    inputs = read_inputs(texts, file)
    if pairs and query is not None:
        raise typer.BadParameter("--query and --pairs exclude each other; give one of them")
    with connected(connection) as client:

        def call(batch: list[str]) -> Answer[TextScore]:
            first, options["text_pairs"] = split_pairs(batch, pairs) if query is None else ([query], batch)
            return client.score_text(first, **options)

        def show(text: str, result: TextScore) -> None:
            typer.echo(f"{result.score:.6g}\t{text}")

        print_answers(inputs, batch_size, call, None if as_json else show)


@takes_options
def embed_image(
    images: ImageArguments = None,
    *,
    file: File = None,
    batch_size: BatchSize = 8,
    as_json: AsJson = False,
    options: EmbedImageOptions,
    connection: ConnectionFlags,
) -> None:
    """Embed image files or prepared images.

    Prints the vector's values separated by spaces, a tab, the file or id.
    """
    inputs, arguments = read_images(images, file, options)
    with connected(connection) as client:
        print_answers(
            inputs,
            batch_size,
            lambda batch: client.embed_image(**arguments(batch), **options),
            None if as_json else _show_vector,
        )


def _show_labels(
    text: str,
    result: TextClassification | ImageClassification | AudioClassification | VideoClassification,
    top_k: int | None,
) -> None:
    shown = result.labels[:_SHOWN_LABELS] if top_k is None else result.labels
    typer.echo(f"{', '.join(f'{label.label} {label.probability:.3f}' for label in shown)}\t{text}")


def _show_vector(text: str, result: TextEmbedding | ImageEmbedding) -> None:
    if isinstance(result, TextEmbedding) and result.token_vectors:
        for one in result.token_vectors:
            typer.echo(f"{' '.join(f'{value:.6g}' for value in one.values)}\t{one.text}")
        return
    values = [f"{value:.6g}" for value in result.values]
    if isinstance(result, TextEmbedding) and result.indices:
        values = [f"{index}:{value}" for index, value in zip(result.indices, values, strict=True)]
    typer.echo(f"{' '.join(values)}\t{text}")


def split_pairs(lines: list[str], pairs: bool) -> tuple[list[str], list[str] | None]:
    """Returns the texts of a call and, for pairs separated by a tab, their second texts.

    Raises:
        ValueError: A line of pairs has no tab.
    """
    if not pairs:
        return lines, None
    split = [line.split("\t", 1) for line in lines]
    for line, parts in zip(lines, split, strict=True):
        if len(parts) != 2:
            raise ValueError(f"--pairs needs two texts separated by a tab; {line[:60]!r} has no tab")
    return [text for text, _ in split], [pair for _, pair in split]
