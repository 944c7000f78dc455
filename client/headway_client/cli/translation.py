"""The command that translates: translate-text."""

from __future__ import annotations

from typing import Annotated

import typer

from headway_client.cli.calls import options_for_stream, print_answers, print_streams
from headway_client.cli.flags import AsJson, BatchSize, ConnectionFlags, File, TextArguments, connected, takes_options
from headway_client.cli.output import print_heading, print_table, read_inputs
from headway_client.options import PhraseConstraints, StreamTranslateTextOptions, TranslateTextOptions
from headway_client.results import TranslatedText

Stream = Annotated[bool, typer.Option("--stream/--no-stream", help="Print text as it is generated.")]
TargetPrefix = Annotated[
    str, typer.Option("--target-prefix", metavar="TEXT", help="What each translation begins with.")
]
RequiredPhrases = Annotated[
    list[str] | None,
    typer.Option("--required-phrase", metavar="TEXT", help="Phrase that must appear; may be repeated."),
]
ForbiddenPhrases = Annotated[
    list[str] | None,
    typer.Option("--forbidden-phrase", metavar="TEXT", help="Phrase that must not appear; may be repeated."),
]


@takes_options
def translate_text(
    texts: TextArguments = None,
    *,
    file: File = None,
    target_prefix: TargetPrefix = "",
    required_phrases: RequiredPhrases = None,
    forbidden_phrases: ForbiddenPhrases = None,
    stream: Stream = False,
    batch_size: BatchSize = 32,
    as_json: AsJson = False,
    options: TranslateTextOptions,
    connection: ConnectionFlags,
) -> None:
    """Translate texts."""
    if required_phrases or forbidden_phrases:
        options["phrase_constraints"] = PhraseConstraints(tuple(required_phrases or ()), tuple(forbidden_phrases or ()))
    headed = file is not None or len(texts or ()) != 1

    def show(text: str, result: TranslatedText) -> None:
        if headed and (result.hypotheses or result.alignments):
            print_heading(text)
        if result.hypotheses:
            print_table([(f"{hypothesis.score:.3f}", hypothesis.text) for hypothesis in result.hypotheses])
        else:
            typer.echo(result.text)
        _show_alignment(text, result)

    inputs = read_inputs(texts, file)
    if stream:
        streamed: StreamTranslateTextOptions = options_for_stream(options, StreamTranslateTextOptions)
        if target_prefix:
            streamed["target_prefix"] = target_prefix
        with connected(connection) as client:
            print_streams(
                inputs,
                lambda text: client.stream_translate_text(text, **streamed),
                None if as_json else _show_alignment,
            )
        return
    if target_prefix:
        options["target_prefixes"] = target_prefix
    with connected(connection) as client:
        print_answers(
            inputs, batch_size, lambda batch: client.translate_text(batch, **options), None if as_json else show
        )


def _show_alignment(text: str, result: TranslatedText) -> None:
    """Prints each word of a translation, the source word that it attended to most, and its share of the attention."""
    if not result.alignments:
        return
    print_table(
        [
            (
                f"  {pair.target.of(result.text)}",
                "(none)" if pair.source is None else pair.source.of(text),
                f"{pair.attention:.2f}",
            )
            for pair in result.word_pairs(text)
        ]
    )
