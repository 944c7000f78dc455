"""The command that translates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer

from headway_client.base import DEFAULT_TIMEOUT_S
from headway_client.channels import DEFAULT_SERVER
from headway_client.cli import parameters
from headway_client.cli.inputs import batches, read_inputs
from headway_client.cli.output import heading, print_answer_json, print_table, with_inputs
from headway_client.cli.parameters import connected, named_inputs
from headway_client.cli.streams import print_streams
from headway_client.options import SharedTranslateOptions, TranslateOptions
from headway_client.translation_results import EarlyStopping, PhraseConstraints, TranslatedText, WordPair

Stream = Annotated[bool, typer.Option("--stream/--no-stream", help="Print text as it appears.")]
SourceLanguage = Annotated[str, typer.Option("--source-language", metavar="CODE", help="Language of the texts.")]
TargetLanguage = Annotated[str, typer.Option("--target-language", metavar="CODE", help="Language to translate to.")]
MaxLengthRatio = Annotated[
    float | None, typer.Option("--max-length-ratio", help="Most tokens to produce for each token of a text.")
]
BeamSize = Annotated[int | None, typer.Option("--beam-size", metavar="N", help="Beams of the search. Default: 1.")]
Hypotheses = Annotated[
    int | None, typer.Option("--hypotheses", metavar="N", help="Translations of each text, with their scores.")
]
LengthPenalty = Annotated[
    float | None, typer.Option("--length-penalty", help="Above 1 favours long translations. Default: 1.")
]
Stopping = Annotated[EarlyStopping | None, typer.Option("--early-stopping", help="When the search ends.")]
NoRepeat = Annotated[
    int | None, typer.Option("--no-repeat-ngram-size", metavar="N", help="N tokens may not follow each other twice.")
]
Sample = Annotated[bool, typer.Option("--sample", help="Draw tokens at random; so do the next five options.")]
Temperature = Annotated[float | None, typer.Option("--temperature", help="Softmax temperature, above 0. Default: 1.")]
TopK = Annotated[int | None, typer.Option("--top-k", help="Draw among the k likeliest tokens.")]
TopP = Annotated[float | None, typer.Option("--top-p", help="Draw among the likeliest tokens of this mass.")]
MinP = Annotated[
    float | None, typer.Option("--min-p", help="Leave out tokens below this share of the likeliest one's probability.")
]
Seed = Annotated[int | None, typer.Option("--seed", help="Seed of the random stream.")]
Prefix = Annotated[str, typer.Option("--prefix", metavar="TEXT", help="What every translation begins with.")]
Require = Annotated[list[str] | None, typer.Option("--require", metavar="PHRASE", help="Must appear; may be repeated.")]
Forbid = Annotated[
    list[str] | None, typer.Option("--forbid", metavar="PHRASE", help="Must not appear; may be repeated.")
]
WithAlignment = Annotated[bool, typer.Option("--alignment", help="Tell which words became which.")]
SplitSentences = Annotated[
    bool, typer.Option("--split-sentences", help="Translate the sentences of a text by themselves.")
]


def translate(
    texts: parameters.Texts = None,
    *,
    file: parameters.File = None,
    server: parameters.Server = DEFAULT_SERVER,
    model: parameters.ModelName = "",
    model_version: parameters.ModelVersion = "",
    source_language: SourceLanguage = "",
    target_language: TargetLanguage = "",
    max_new_tokens: parameters.MaxNewTokens = None,
    max_length_ratio: MaxLengthRatio = None,
    beam_size: BeamSize = None,
    hypotheses: Hypotheses = None,
    length_penalty: LengthPenalty = None,
    early_stopping: Stopping = None,
    no_repeat_ngram_size: NoRepeat = None,
    sample: Sample = False,
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    min_p: MinP = None,
    seed: Seed = None,
    prefix: Prefix = "",
    require: Require = None,
    forbid: Forbid = None,
    alignment: WithAlignment = False,
    split_sentences: SplitSentences = False,
    truncate: parameters.Truncate = False,
    stream: Stream = False,
    batch_size: parameters.BatchSize = 32,
    timeout: parameters.Timeout = DEFAULT_TIMEOUT_S,
    as_json: parameters.AsJson = False,
) -> None:
    """Translate texts, line by line."""
    shared: SharedTranslateOptions = {
        "model": model,
        "model_version": model_version,
        "truncate": truncate,
        "source_language": source_language,
        "target_language": target_language,
        "max_new_tokens": max_new_tokens,
        "max_length_ratio": max_length_ratio,
        "length_penalty": length_penalty,
        "no_repeat_ngram_size": no_repeat_ngram_size,
        "sample": sample,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "seed": seed,
        "alignment": alignment,
    }
    unary: TranslateOptions = {
        **shared,
        "beam_size": beam_size,
        "hypotheses": hypotheses,
        "early_stopping": early_stopping,
        "split_sentences": split_sentences,
        "target_prefix": prefix or (),
        "phrases": PhraseConstraints(tuple(require or ()), tuple(forbid or ())) if require or forbid else (),
    }
    inputs = read_inputs(texts, file)
    headed = file is not None or len(texts or ()) != 1
    if stream:
        _check_streams(unary)
    with connected(server, timeout) as client:
        if stream:
            print_streams(
                inputs,
                lambda text: client.stream_translate(text, target_prefix=prefix, **shared),
                as_json,
                after=_print_alignment if alignment else None,
            )
            return
        for batch in batches(inputs, batch_size):
            with named_inputs(batch):
                answer = client.translate(batch, **unary)
            if as_json:
                print_answer_json(batch, answer)
                continue
            for text, result in with_inputs(batch, answer):
                _print_result(text, result, headed=headed)


def _check_streams(options: TranslateOptions) -> None:
    """Refuses what a stream cannot do."""
    flags = {
        "--beam-size": options.get("beam_size") not in (None, 1),
        "--hypotheses": options.get("hypotheses") not in (None, 1),
        "--require and --forbid": options.get("phrases"),
        "--split-sentences": options.get("split_sentences"),
    }
    if refused := [flag for flag, is_given in flags.items() if is_given]:
        raise typer.BadParameter(f"a stream does not go with {', '.join(refused)}; leave out --stream or these")


def _print_result(text: str, result: TranslatedText, *, headed: bool) -> None:
    """Prints a translation on a line; with several or an alignment, what belongs to one text under its heading."""
    if headed and (result.hypotheses or result.alignments):
        typer.echo(heading(text))
    if result.hypotheses:
        print_table([(f"{hypothesis.score:.3f}", hypothesis.text) for hypothesis in result.hypotheses])
    else:
        typer.echo(result.text)
    if result.alignments:
        _print_alignment(text, result)


def _print_alignment(text: str, result: TranslatedText) -> None:
    """Prints each word of the translation, the word of the text that it looked at most, and the share of that."""
    pairs: Sequence[WordPair] = result.word_pairs(text)
    if pairs:
        print_table(
            [
                (
                    f"  {pair.target.of(result.text)}",
                    "(none)" if pair.source is None else pair.source.of(text),
                    f"{pair.attention:.2f}",
                )
                for pair in pairs
            ]
        )
