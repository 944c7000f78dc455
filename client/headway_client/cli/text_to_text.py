"""The text-to-text commands: translate-text, rewrite-text."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, TypeVar

import typer

from headway_client.cli.calls import options_for_stream, print_answers, print_streams
from headway_client.cli.flags import AsJson, BatchSize, ConnectionFlags, File, TextArguments, connected, takes_options
from headway_client.cli.output import print_heading, print_table, read_inputs
from headway_client.options import (
    PhraseConstraints,
    RewriteTextOptions,
    StreamRewriteTextOptions,
    StreamTranslateTextOptions,
    TranslateTextOptions,
)
from headway_client.results import Answer, RewrittenText, TranslatedText
from headway_client.streams import TextStream

WrittenT = TypeVar("WrittenT", TranslatedText, RewrittenText)

Stream = Annotated[bool, typer.Option("--stream/--no-stream", help="Print text as it is generated.")]
TargetPrefix = Annotated[str, typer.Option("--target-prefix", metavar="TEXT", help="Beginning of each new text.")]
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
    inputs = _Inputs(read_inputs(texts, file), headed=file is not None or len(texts or ()) != 1, as_json=as_json)
    phrases = PhraseConstraints(tuple(required_phrases or ()), tuple(forbidden_phrases or ()))
    if phrases.required or phrases.forbidden:
        options["phrase_constraints"] = phrases
    if stream:
        streamed: StreamTranslateTextOptions = options_for_stream(options, StreamTranslateTextOptions)
        if target_prefix:
            streamed["target_prefix"] = target_prefix
        with connected(connection) as client:
            inputs.stream(lambda text: client.stream_translate_text(text, **streamed))
        return
    if target_prefix:
        options["target_prefixes"] = target_prefix
    with connected(connection) as client:
        inputs.answer(batch_size, lambda batch: client.translate_text(batch, **options))


@takes_options
def rewrite_text(
    texts: TextArguments = None,
    *,
    file: File = None,
    target_prefix: TargetPrefix = "",
    required_phrases: RequiredPhrases = None,
    forbidden_phrases: ForbiddenPhrases = None,
    stream: Stream = False,
    batch_size: BatchSize = 32,
    as_json: AsJson = False,
    options: RewriteTextOptions,
    connection: ConnectionFlags,
) -> None:
    """Rewrite texts as the model was trained to: summaries, answers to instructions."""
    inputs = _Inputs(read_inputs(texts, file), headed=file is not None or len(texts or ()) != 1, as_json=as_json)
    phrases = PhraseConstraints(tuple(required_phrases or ()), tuple(forbidden_phrases or ()))
    if phrases.required or phrases.forbidden:
        options["phrase_constraints"] = phrases
    if stream:
        streamed: StreamRewriteTextOptions = options_for_stream(options, StreamRewriteTextOptions)
        if target_prefix:
            streamed["target_prefix"] = target_prefix
        with connected(connection) as client:
            inputs.stream(lambda text: client.stream_rewrite_text(text, **streamed))
        return
    if target_prefix:
        options["target_prefixes"] = target_prefix
    with connected(connection) as client:
        inputs.answer(batch_size, lambda batch: client.rewrite_text(batch, **options))


@dataclass(frozen=True, slots=True)
class _Inputs:
    """Texts of a command and the printing of their results."""

    texts: Iterator[str]
    headed: bool
    as_json: bool

    def stream(self, open_stream: Callable[[str], TextStream[WrittenT]]) -> None:
        """Prints one streamed text after another."""
        print_streams(self.texts, open_stream, None if self.as_json else _show_alignment)

    def answer(self, batch_size: int, call: Callable[[list[str]], Answer[WrittenT]]) -> None:
        """Prints the results of one call after another."""
        print_answers(self.texts, batch_size, call, None if self.as_json else self._show)

    def _show(self, text: str, result: TranslatedText | RewrittenText) -> None:
        if self.headed and (result.hypotheses or getattr(result, "alignments", ())):
            print_heading(text)
        if result.hypotheses:
            print_table([(f"{hypothesis.score:.3f}", hypothesis.text) for hypothesis in result.hypotheses])
        else:
            typer.echo(result.text)
        _show_alignment(text, result)


def _show_alignment(text: str, result: TranslatedText | RewrittenText) -> None:
    """Prints each word of a translation with its most attended source word and the share of attention."""
    if not isinstance(result, TranslatedText) or not result.alignments:
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
