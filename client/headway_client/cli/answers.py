"""The commands that find answers in texts and fill masks."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from headway_client.cli.calls import print_answers
from headway_client.cli.classification import Pairs, split_pairs
from headway_client.cli.flags import (
    AsJson,
    BatchSize,
    ConnectionFlags,
    File,
    TextArguments,
    connected,
    takes_options,
)
from headway_client.cli.output import print_heading, print_table, read_inputs
from headway_client.options import AnswerQuestionOptions, FillMaskOptions
from headway_client.results import Answer, FilledText, QuestionAnswers


@takes_options
def answer_question(
    questions: TextArguments = None,
    *,
    context: Annotated[str | None, typer.Option(help="Text in which the answers are found.")] = None,
    context_file: Annotated[Path | None, typer.Option(metavar="FILE", help="Read that text from FILE.")] = None,
    file: File = None,
    pairs: Pairs = False,
    batch_size: BatchSize = 32,
    as_json: AsJson = False,
    options: AnswerQuestionOptions,
    connection: ConnectionFlags,
) -> None:
    """Find answers to questions in a text, or with --pairs each in its own: a question, a tab, a context.

    Prints a line for each answer: start, end, score, text. "no answer" stands where there is none.
    """
    if pairs + (context is not None) + (context_file is not None) != 1:
        raise typer.BadParameter("answers are found in a text; give one of --context, --context-file and --pairs")
    inputs = read_inputs(questions, file)
    headed = file is not None or len(questions or ()) != 1

    def show(question: str, result: QuestionAnswers) -> None:
        if headed:
            print_heading(question)
        rows = [
            (str(one.span.start), str(one.span.end), f"{one.score:.3f}", " ".join(one.text.split()))
            for one in result.answers
        ]
        print_table(rows or [("-", "-", f"{result.no_answer_score:.3f}", "no answer")])

    with connected(connection) as client:
        # Line ends stay as they are in the file, so that spans count its characters.
        text = context or "" if context_file is None else context_file.read_bytes().decode()

        def call(batch: list[str]) -> Answer[QuestionAnswers]:
            asked, contexts = split_pairs(batch, pairs)
            return client.answer_question(asked, contexts or [text], **options)

        print_answers(inputs, batch_size, call, None if as_json else show, shared=() if pairs else ("contexts",))


@takes_options
def fill_mask(
    texts: TextArguments = None,
    *,
    file: File = None,
    batch_size: BatchSize = 32,
    as_json: AsJson = False,
    options: FillMaskOptions,
    connection: ConnectionFlags,
) -> None:
    """Fill masks of texts, written [MASK] or <mask>.

    Prints a line for each token: start of the mask, probability, token, the filled text.
    """
    inputs = read_inputs(texts, file)
    headed = file is not None or len(texts or ()) != 1

    def show(text: str, result: FilledText) -> None:
        if headed:
            print_heading(text)
        print_table(
            [
                (str(mask.span.start), f"{one.probability:.3f}", one.token.strip(), one.filled_text)
                for mask in result.masks
                for one in mask.tokens
            ]
        )

    with connected(connection) as client:
        print_answers(inputs, batch_size, lambda batch: client.fill_mask(batch, **options), None if as_json else show)
