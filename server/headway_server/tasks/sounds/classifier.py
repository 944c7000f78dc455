"""Served audio classification model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from headway_server.batching import Postprocess, Tensors
from headway_server.bundles import Manifest
from headway_server.errors import InvalidInputError
from headway_server.field_rules import most_elements
from headway_server.observers import note_truncated
from headway_server.preprocessing.audio import PreparedAudio
from headway_server.serving.answers import Answer
from headway_server.serving.limits import check_count, check_top_k
from headway_server.tasks.outputs import LOGITS, ScoredLabel, logits_postprocess
from headway_server.tasks.sounds.model import SoundModel

MAX_AUDIOS: Final = most_elements("ClassifyAudioRequest.audios")
"""Maximum audios of a call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassifiedAudio:
    """Labels of one audio, the most likely first."""

    labels: tuple[ScoredLabel, ...]
    duration_s: float
    is_truncated: bool
    """True if the model has read its beginning alone."""


class AudioClassifier(SoundModel):
    """Classifies audio."""

    @classmethod
    def _postprocess(cls, manifest: Manifest) -> Postprocess | None:
        return logits_postprocess(manifest)

    async def classify(
        self, audios: Sequence[bytes], *, top_k: int, truncate: bool, deadline: float | None
    ) -> Answer[ClassifiedAudio]:
        """Classifies audios.

        Args:
            audios: 1 to `MAX_AUDIOS` encoded audios.
            top_k: Labels to answer an audio, 1 to the number of labels; 0: all of them.
            truncate: True to cut longer audio than the model reads; a model of a fixed number of frames always does.
            deadline: End of the caller's wait, in seconds of `time.monotonic`.

        Raises:
            RequestError: An argument is out of its range, an audio cannot be read, the queue is full, the deadline
                passed, the server is draining.
        """
        check_count("audios", len(audios), MAX_AUDIOS)
        num_labels = check_top_k(top_k, len(self.labels))
        cuts, most = truncate or self._sound.num_frames is not None, self._sound.window_samples
        names = [f"audios[{number}]" for number in range(len(audios))]

        def sizes(audio: PreparedAudio, name: str) -> list[int]:
            if (size := len(audio.samples)) > most:
                if not cuts:
                    raise InvalidInputError(
                        name,
                        f"has {audio.duration_s:.1f} seconds, and {self.bundle.manifest.name} reads "
                        f"{most / self._sound.sampling_rate:g}; cut it, or set truncate",
                    )
                note_truncated()
            return [min(size, most)]

        def read(row: Tensors) -> tuple[ScoredLabel, ...]:
            return self._label_reader.read(row[LOGITS], num_labels)

        with self._begin(len(audios), deadline) as job:
            prepared = await self._prepare(job, audios, names, sizes)
            labels = await self._run(job, [audio.samples[:most] for audio in prepared], read)
            return job.answer(
                [
                    ClassifiedAudio(labels=found, duration_s=audio.duration_s, is_truncated=len(audio.samples) > most)
                    for audio, found in zip(prepared, labels, strict=True)
                ]
            )
