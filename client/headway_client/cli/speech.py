"""The command that writes what is said: transcribe."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from headway_client.cli.calls import options_for_stream, print_answers, print_streams
from headway_client.cli.flags import AsJson, BatchSize, ConnectionFlags, File, connected, takes_options
from headway_client.cli.output import print_heading, print_table, read_inputs
from headway_client.options import StreamTranscribeSpeechOptions, TranscribeSpeechOptions
from headway_client.results import SpeechSegment, SpeechTranscript

AudioArguments = Annotated[
    list[str] | None, typer.Argument(metavar="[AUDIO]...", help="Audio files; or use --file or stdin.")
]


@takes_options
def transcribe(
    audios: AudioArguments = None,
    *,
    file: File = None,
    timestamps: Annotated[
        bool, typer.Option("--timestamps", help="Print each segment with the times when it begins and ends.")
    ] = False,
    stream: Annotated[bool, typer.Option("--stream/--no-stream", help="Print text as it is written.")] = False,
    batch_size: BatchSize = 1,
    as_json: AsJson = False,
    options: TranscribeSpeechOptions,
    connection: ConnectionFlags,
) -> None:
    """Say what is said in audio files: WAV, FLAC, OGG or MP3."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Show:
    """How transcripts are shown."""

    headed: bool

    def whole(self, path: str, result: SpeechTranscript) -> None:
        """Shows what is said in an audio."""
        if self.headed:
            print_heading(path)
        if result.hypotheses:
            print_table([(f"{one.score:.3f}", one.text) for one in result.hypotheses])
        elif result.segments:
            self.times(path, result)
        else:
            typer.echo(result.text)

    def times(self, _path: str, result: SpeechTranscript) -> None:
        """Shows the segments, where they have times."""
        if result.segments:
            print_table([(_span(segment), segment.text.strip()) for segment in result.segments])


def _span(segment: SpeechSegment) -> str:
    return f"{_clock(segment.start)} - {_clock(segment.end)}"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds * 100), 6000)
    return f"{minutes:02d}:{rest // 100:02d}.{rest % 100:02d}"
