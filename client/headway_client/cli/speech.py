"""The speech commands: transcribe and speak."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from headway_client.cli.calls import options_for_stream, print_answers, print_streams
from headway_client.cli.flags import AsJson, AudioArguments, BatchSize, ConnectionFlags, File, connected, takes_options
from headway_client.cli.output import as_dict, print_heading, print_json, print_table, read_inputs
from headway_client.client import Client
from headway_client.options import (
    AudioFormat,
    StreamSynthesizeSpeechOptions,
    StreamTranscribeSpeechOptions,
    SynthesizeSpeechOptions,
    TranscribeSpeechOptions,
)
from headway_client.results import SpeechSegment, SpeechTranscript


@takes_options
def transcribe(
    audios: AudioArguments = None,
    *,
    file: File = None,
    timestamps: Annotated[
        bool, typer.Option("--timestamps", help="Print each segment with its start and end times.")
    ] = False,
    stream: Annotated[bool, typer.Option("--stream/--no-stream", help="Print text as it is generated.")] = False,
    batch_size: BatchSize = 1,
    as_json: AsJson = False,
    options: TranscribeSpeechOptions,
    connection: ConnectionFlags,
) -> None:
    """Transcribe audio: WAV, FLAC, OGG or MP3 files."""
    inputs = list(read_inputs(audios, file))
    if timestamps:
        options["include_timestamps"] = True
    show = _Show(headed=len(inputs) != 1)
    if stream:
        streamed: StreamTranscribeSpeechOptions = options_for_stream(options, StreamTranscribeSpeechOptions)
        with connected(connection) as client:
            print_streams(
                inputs,
                lambda path: client.stream_transcribe_speech(Path(path), **streamed),
                None if as_json else show.times,
                headed=show.headed,
            )
        return
    with connected(connection) as client:
        print_answers(
            inputs,
            batch_size,
            lambda batch: client.transcribe_speech([Path(path) for path in batch], **options),
            None if as_json else show.whole,
        )


@takes_options
def speak(
    text: Annotated[str, typer.Argument(help="Text to speak.")],
    *,
    output: Annotated[
        str,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="Audio file; its suffix sets the format unless --format does. - streams samples to stdout "
            "as they are made: signed, 16 bits, little-endian, mono.",
        ),
    ],
    as_json: AsJson = False,
    options: SynthesizeSpeechOptions,
    connection: ConnectionFlags,
) -> None:
    """Synthesize speech into an audio file, or for a player.

    Prints the file, the seed and the duration. To play it at once, for a model of 8 kHz:
    headway speak TEXT -o - | aplay -f S16_LE -r 8000
    """
    with connected(connection, None if output == "-" else Path(output)) as client:
        if output == "-":
            _play(client, text, options_for_stream(options, StreamSynthesizeSpeechOptions))
            return
        if options.get("format") is None:
            options["format"] = _format_of(output)
        [spoken] = client.synthesize_speech(text, **options)
        Path(output).write_bytes(spoken.audio)
    if as_json:
        shown = {name: value for name, value in as_dict(spoken).items() if name != "audio"}
        print_json({"file": output, **shown})
    else:
        print_table([("FILE", "SEED", "SECONDS"), (output, str(spoken.seed), f"{spoken.duration_seconds:.2f}")])


def _play(client: Client, text: str, options: StreamSynthesizeSpeechOptions) -> None:
    """Writes samples to stdout as they are made, and their rate to stderr."""
    rate = 0
    with client.stream_synthesize_speech(text, **options) as stream:
        for part in stream:
            if not rate:
                rate = part.sampling_rate
                typer.echo(f"signed 16 bit little-endian mono samples, {rate} a second", err=True)
            sys.stdout.buffer.write(part.pcm)
            sys.stdout.buffer.flush()


def _format_of(file: str) -> AudioFormat:
    """The format that a file's name ends in."""
    formats = {f".{form}": form for form in AudioFormat} | {".ogg": AudioFormat.OPUS}
    suffix = Path(file).suffix.lower()
    if suffix not in formats:
        raise typer.BadParameter(
            f"{file} does not end in {', '.join(formats)}; rename it, or give --format", param_hint="--output"
        )
    return formats[suffix]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Show:
    """Printing of transcripts."""

    headed: bool

    def whole(self, path: str, result: SpeechTranscript) -> None:
        """Shows the transcript of an audio."""
        if self.headed:
            print_heading(path)
        if result.hypotheses:
            print_table([(f"{one.score:.3f}", one.text) for one in result.hypotheses])
        elif result.segments:
            self.times(path, result)
        else:
            typer.echo(result.text)

    def times(self, _path: str, result: SpeechTranscript) -> None:
        """Shows the segments, if they have times."""
        if result.segments:
            print_table([(_span(segment), segment.text.strip()) for segment in result.segments])


def _span(segment: SpeechSegment) -> str:
    return f"{_clock(segment.start_seconds)} - {_clock(segment.end_seconds)}"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds * 100), 6000)
    return f"{minutes:02d}:{rest // 100:02d}.{rest % 100:02d}"
