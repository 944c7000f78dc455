"""AudioClassificationService."""

from __future__ import annotations

import time

from headway.v1 import audio_classification_service_pb2 as pb
from headway_server.services.messages import build, find_model, label_scores, signed
from headway_server.serving.host import ModelHost
from headway_server.tasks.table import CLASSIFY_AUDIOS


class AudioClassificationService:
    """Servicer of audio classification models."""

    def __init__(self, host: ModelHost) -> None:
        self._host = host

    async def ClassifyAudio(self, request: pb.ClassifyAudioRequest, deadline: float | None) -> pb.ClassifyAudioResponse:
        """Classifies every audio."""
        arrived = time.monotonic()
        model = find_model(self._host, CLASSIFY_AUDIOS, request)
        answer = await model.classify(
            list(request.audios), top_k=request.top_k, truncate=request.truncate, deadline=deadline
        )
        return await build(
            sum(len(result.labels) for result in answer.results),
            lambda: pb.ClassifyAudioResponse(
                results=[
                    pb.AudioClassification(
                        labels=label_scores(result.labels),
                        duration_seconds=result.duration_s,
                        truncated=result.is_truncated,
                    )
                    for result in answer.results
                ],
                **signed(model, answer.timings, arrived),
            ),
        )
