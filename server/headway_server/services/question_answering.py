"""QuestionAnsweringService."""

from __future__ import annotations

import time

from headway.v1 import question_answering_service_pb2 as pb
from headway_server.services.messages import build, find_model, signed, text_span
from headway_server.serving.host import ModelHost
from headway_server.tasks.question_answering.model import AnsweredQuestion, QuestionRequest
from headway_server.tasks.table import ANSWER_QUESTIONS


class QuestionAnsweringService:
    """Servicer of models that find answers in texts."""

    def __init__(self, host: ModelHost) -> None:
        self._host = host

    async def AnswerQuestion(
        self, request: pb.AnswerQuestionRequest, deadline: float | None
    ) -> pb.AnswerQuestionResponse:
        """Finds answers in every context."""
        arrived = time.monotonic()
        model = find_model(self._host, ANSWER_QUESTIONS, request)
        asked = QuestionRequest(
            questions=list(request.questions),
            contexts=list(request.contexts),
            top_k=request.top_k,
            max_answer_tokens=request.max_answer_token_count,
            window_tokens=request.window_token_count,
            overlap_tokens=request.overlap_token_count if request.HasField("overlap_token_count") else None,
            no_answer_threshold=request.no_answer_threshold if request.HasField("no_answer_threshold") else None,
            splits_words=request.split_words,
        )
        answer = await model.answer(asked, deadline=deadline)
        return await build(
            sum(len(result.answers) for result in answer.results),
            lambda: pb.AnswerQuestionResponse(
                results=[_question_answers(result) for result in answer.results],
                **signed(model, answer.timings, arrived),
            ),
        )


def _question_answers(result: AnsweredQuestion) -> pb.QuestionAnswers:
    return pb.QuestionAnswers(
        answers=[
            pb.ExtractedAnswer(text=one.text, span=text_span((one.start, one.end)), score=one.score)
            for one in result.answers
        ],
        no_answer_score=result.no_answer_score,
        token_count=result.num_tokens,
        window_count=result.num_windows,
    )
