"""Base of models that read sounds whole: decoding, preparation and batching of audio.

Inputs run together if they have the same shape: padding would change what many of these models compute.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from headway_server.batching import Batcher, BatchGraph, Postprocess, Tensors
from headway_server.bundles import Bundle, Manifest, demanded
from headway_server.observers import NO_OBSERVER, Observer
from headway_server.preprocessing.audio import PreparedAudio
from headway_server.preprocessing.sound import SoundReader
from headway_server.runtime import Runtime
from headway_server.settings import ServerSettings
from headway_server.tasks.job import Job
from headway_server.tasks.outputs import LOGITS
from headway_server.tasks.stateless import StatelessModel, StatelessParts, with_memory

Result = TypeVar("Result")


class SoundModel(StatelessModel):
    """Model whose graph reads sounds."""

    _noun = "audios"
    _memory_noun = "decoded audio"

    def __init__(self, bundle: Bundle, parts: StatelessParts) -> None:
        """Assembles a model from its parts.

        Raises:
            BundleError: A part does not fit the model.
            RuntimeUnavailableError: The libraries that read audio are not installed.
        """
        self._sound, batching = demanded(bundle.manifest.sound), parts.settings.batching
        super().__init__(bundle, parts, budget=self._sound.window_samples, max_waiting=batching.max_waiting_audios)
        self._sounds = SoundReader(self._sound, parts.settings.audio_limits, max_bytes=batching.max_waiting_bytes)

    @classmethod
    def load(cls, bundle: Bundle, runtime: Runtime, settings: ServerSettings, observer: Observer = NO_OBSERVER) -> Self:
        """Loads the requested variant, or the best one for the runtime, and runs it once on a second of silence.

        Raises:
            BundleError: The graph cannot be loaded, or a part of the bundle does not fit it.
            MemoryUnavailableError: Not even one run of the longest sound fits into memory.
            RuntimeUnavailableError: The bundle does not have the variant, or a library is not installed.
        """
        manifest = bundle.manifest
        sound = demanded(manifest.sound)
        precision, variant = runtime.choose_variant(manifest, settings.precision)
        size = sound.window_samples
        runtime = with_memory(runtime, manifest, variant, largest=size, batch=size, unit="samples")
        graph = BatchGraph(runtime.open(bundle, variant.graphs["model"]), postprocess=cls._postprocess(manifest))
        second = np.zeros(min(max(sound.min_samples, sound.sampling_rate), size), np.float32)
        item = SoundReader(sound, None, max_bytes=0).input_of(second)
        graph.warm_up(item, len(second), {LOGITS: (len(manifest.labels),)} if manifest.labels else {})
        parts = StatelessParts(
            precision=precision, graph=graph, max_padding=None, runtime=runtime, settings=settings, observer=observer
        )
        return cls(bundle, parts)

    @classmethod
    def _postprocess(cls, manifest: Manifest) -> Postprocess | None:  # noqa: ARG003
        """Returns the postprocessing of a batch's outputs; see `BatchGraph`."""
        return None

    def _begin(self, count: int, deadline: float | None) -> Job[Batcher]:
        """Returns a call of so many audios."""
        return Job(self._batcher, self._admission, self._memory, count=count, work=1, num_bytes=0, deadline=deadline)

    async def _prepare(
        self,
        job: Job[Batcher],
        audios: Sequence[bytes],
        names: Sequence[str],
        sizes: Callable[[PreparedAudio, str], Sequence[int]],
    ) -> list[PreparedAudio]:
        """Decodes audios, and reserves their bytes and those of their inputs.

        Args:
            job: The call.
            audios: Encoded audios.
            names: Their names in the request.
            sizes: Returns the samples of each input of a decoded audio of a name.
        """
        prepared: list[PreparedAudio] = []
        total = 0
        with job.preparing():
            for data, name in zip(audios, names, strict=True):
                audio = await self._sounds.decode(data, name)
                prepared.append(audio)
                total += self._sounds.num_bytes(len(audio.samples), sizes(audio, name))
                job.reserve(self._sounds.check_bytes(prepared, total))
        return prepared

    async def _run(
        self, job: Job[Batcher], sounds: Sequence[NDArray[np.float32]], read: Callable[[Tensors], Result]
    ) -> list[Result]:
        """Returns what is read of the logits of sounds of at most a window, off the event loop."""
        with job.preparing():
            items = await self._sounds.inputs(sounds)
        [name] = items[0]
        batched = await job.batch(
            self._batcher,
            items,
            outputs=(LOGITS,),
            num_bytes=0,
            num_read=sum(map(self._num_positions, sounds)),
            read=lambda row, _: read(row),
            lengths=[max(len(sound), self._sound.min_samples) for sound in sounds],
            groups=[item[name].shape for item in items],
        )
        job.note(batched.runs)
        return batched.results

    def _num_positions(self, sound: NDArray[np.float32]) -> int:
        """Returns the positions of a sound, which its caller is charged for as tokens: hundredths of a second."""
        return -(-100 * len(sound) // self._sound.sampling_rate)
