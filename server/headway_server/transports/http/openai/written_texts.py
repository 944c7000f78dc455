"""Generated texts in the forms of completions and chat completions: whole, and as the events of a stream."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from headway_server.decoding.sequence import Delta, FinishReason, TokenLogProbability
from headway_server.observers import current_call
from headway_server.preprocessing import AnswerDelta, AnswerReader
from headway_server.preprocessing.pool import text_pool
from headway_server.serving.answers import Answer
from headway_server.tasks.generation.model import GeneratedText, GenerationModel
from headway_server.tasks.generation.request import GenerationRequest
from headway_server.transports.http.openai.form import DONE, event
from headway_server.transports.http.openai.requests import ChatBody, CompletionBody
from headway_server.transports.http.openai.written_tokens import TokenCounts, TokenWriter

_REASONS: Final = {
    FinishReason.END_OF_SEQUENCE: "stop",
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.CONSTRAINT: "stop",
}


class TextWriter:
    """Formats generated texts; subclasses add the names of each API."""

    kind = ""
    kind_of_chunk = ""
    prefix = ""

    def __init__(self, model: GenerationModel, body: CompletionBody | ChatBody) -> None:
        call, manifest = current_call(), model.bundle.manifest
        self._model = model
        self._body = body
        self._tokens = TokenWriter(model)
        self._head = {
            "id": f"{self.prefix}-{call.request_id if call is not None else ''}",
            "created": int(time.time()),
            "model": manifest.name,
            "system_fingerprint": f"{manifest.name}/{manifest.version}/{model.precision.value}",
        }

    def whole(self, answer: Answer[GeneratedText]) -> dict[str, Any]:
        """Formats the answer to a unary call."""
        choices = [self._choice(index, text) for index, text in enumerate(answer.results)]
        return self._head | {
            "object": self.kind,
            "choices": choices,
            "usage": TokenCounts.of(answer.results).usage(),
        }

    def chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        """Formats an event of a stream."""
        return self._head | {"object": self.kind_of_chunk, "choices": choices}

    async def events(self, parts: AsyncGenerator[Delta | Answer[GeneratedText], None]) -> AsyncGenerator[bytes, None]:
        """Formats a model's output as the events of a stream."""
        is_first = True
        async with aclosing(parts):
            async for part in parts:
                written = self._first_events(_prompt_of(part)) if is_first else b""
                is_first = False
                if isinstance(part, Delta):
                    if part.prompt_tokens:  # formatting a long prompt takes time
                        written += await asyncio.get_running_loop().run_in_executor(
                            text_pool(), self._delta_events, part
                        )
                    else:
                        written += self._delta_events(part)
                    if written:
                        yield written
                else:
                    yield written + self._last_events(part) + DONE

    def _first_events(self, prompt_ids: NDArray[np.int64]) -> bytes:
        return self._events(self.first(prompt_ids), TokenCounts(num_read=len(prompt_ids), num_new=0))

    def _delta_events(self, delta: Delta) -> bytes:
        if (choice := self.delta(delta)) is None:
            return b""
        counts = TokenCounts(num_read=len(_prompt_of(delta)), num_new=delta.num_new_tokens)
        return self._events([self.chunk([choice])], counts)

    def _last_events(self, answer: Answer[GeneratedText]) -> bytes:
        written = b""
        for index, text in enumerate(answer.results):
            last = (self.chunk([choice]) for choice in self.last(replace(text, sample=index)))
            written += self._events(last, TokenCounts.of([replace(text, sample=0)]))
        if self._body.includes_usage:
            written += event(self.chunk([]) | {"usage": TokenCounts.of(answer.results).usage()})
        return written

    def _events(self, chunks: Iterable[dict[str, Any]], counts: TokenCounts) -> bytes:
        usage = counts.usage() if self._body.counts_continuously else None
        beside = {"usage": usage} if self._body.includes_usage else {}
        return b"".join(event(chunk | beside) for chunk in chunks)

    def first(self, prompt_ids: NDArray[np.int64]) -> Iterator[dict[str, Any]]:  # noqa: ARG002 (for subclasses)
        """Yields the events before the first text; `prompt_ids` are the tokens of its prompt."""
        yield from ()

    def delta(self, delta: Delta) -> dict[str, Any] | None:
        """Formats a delta; None if it is empty."""
        raise NotImplementedError

    def last(self, text: GeneratedText) -> Iterator[dict[str, Any]]:
        """Formats the rest of a text, and the reason of its end."""
        raise NotImplementedError

    def _choice(self, index: int, text: GeneratedText) -> dict[str, Any]:
        raise NotImplementedError

    def _token_ids(self, tokens: Iterable[TokenLogProbability]) -> dict[str, Any]:
        """Returns the tokens of a text or a part of it, if they are wanted."""
        return {"token_ids": [token.token_id for token in tokens]} if self._body.return_token_ids else {}

    def _prompt_ids(self, prompt_ids: NDArray[np.int64]) -> dict[str, Any]:
        """Returns the tokens of a prompt, if they are wanted."""
        return {"prompt_token_ids": prompt_ids.tolist()} if self._body.return_token_ids else {}

    def _prompt_logprobs(self, text: GeneratedText) -> dict[str, Any]:
        """Returns the log-probabilities of a prompt, if they are wanted."""
        number = self._body.prompt_logprobs
        return {} if number is None else {"prompt_logprobs": self._tokens.ranks(text.result.prompt_tokens, number)}


class CompletionWriter(TextWriter):
    """Writes completions."""

    kind = kind_of_chunk = "text_completion"
    prefix = "cmpl"

    def __init__(self, model: GenerationModel, body: CompletionBody) -> None:
        """Formats a model's texts."""
        super().__init__(model, body)
        self._begun = set[int]()
        """Texts of a stream whose first event is written."""

    def delta(self, delta: Delta) -> dict[str, Any] | None:
        """See `TextWriter`."""
        if not delta.output and not delta.tokens:
            return None
        logprobs = self._logprobs(delta.prompt_tokens or delta.tokens, delta.text_offsets)
        choice = {"index": delta.sample, "text": delta.output, "logprobs": logprobs, "finish_reason": None}
        return choice | self._begin(delta.sample, delta.prompt_ids) | self._token_ids(delta.tokens)

    def last(self, text: GeneratedText) -> Iterator[dict[str, Any]]:
        """See `TextWriter`."""
        reason = _REASONS[text.result.finish_reason]
        choice = {"index": text.sample, "text": "", "logprobs": None, "finish_reason": reason}
        yield choice | self._begin(text.sample, text.prompt_ids)

    def _begin(self, index: int, prompt_ids: NDArray[np.int64] | None) -> dict[str, Any]:
        """Returns the tokens of a text's prompt in its first event."""
        if index in self._begun or prompt_ids is None:
            return {}
        self._begun.add(index)
        return self._prompt_ids(prompt_ids)

    def _choice(self, index: int, text: GeneratedText) -> dict[str, Any]:
        result = text.result
        logprobs = None
        if self._body.num_top_tokens is not None and (tokens := (*result.prompt_tokens, *result.tokens)):
            start = 0 if self._body.echo else len(result.prompt_tokens)
            logprobs = self._logprobs(tokens[start:], text.text_offsets()[start:])
        choice = {
            "index": index,
            "text": text.text,
            "logprobs": logprobs,
            "finish_reason": _REASONS[result.finish_reason],
        }
        return choice | self._prompt_ids(text.prompt_ids) | self._token_ids(result.tokens) | self._prompt_logprobs(text)

    def _logprobs(self, tokens: Sequence[TokenLogProbability], text_offsets: Sequence[int]) -> dict[str, Any] | None:
        if not tokens or self._body.num_top_tokens is None:
            return None
        return {
            "tokens": [self._text(token.token_id) for token in tokens],
            "token_logprobs": [token.log_probability for token in tokens],
            "top_logprobs": [self._top(token) or None for token in tokens],
            "text_offset": list(text_offsets),
        }

    def _top(self, token: TokenLogProbability) -> dict[str, float]:
        """Formats the likeliest tokens; of several with the same text, all but the first are written as ids."""
        found: dict[str, float] = {}
        for token_id, log_probability in token.top_tokens[: self._body.num_top_tokens]:
            text = self._text(token_id)
            found[f"token_id:{token_id}" if text in found else text] = log_probability
        return found

    def _text(self, token_id: int) -> str:
        return self._tokens.text(token_id, "bytes:")[0]


def prompts_alone(answer: Answer[GeneratedText]) -> Answer[GeneratedText]:
    """Returns echoed prompts without the token that was generated behind each."""

    def alone(text: GeneratedText) -> GeneratedText:
        result = replace(text.result, output="", tokens=(), num_new_tokens=0, finish_reason=FinishReason.LENGTH)
        count, offsets = len(result.prompt_tokens), text.text_offsets
        own = text.text.removesuffix(text.result.output)
        return replace(text, text=own, result=result, text_offsets=lambda: offsets()[:count])

    return replace(answer, results=[alone(text) for text in answer.results])


async def prompts_of_parts(
    parts: AsyncGenerator[Delta | Answer[GeneratedText], None],
) -> AsyncGenerator[Delta | Answer[GeneratedText], None]:
    """Yields the parts of echoed prompts alone; see `prompts_alone`."""
    async with aclosing(parts):
        async for part in parts:
            if isinstance(part, Answer):
                yield prompts_alone(part)
            elif not part.num_new_tokens:
                yield part


class ChatWriter(TextWriter):
    """Formats chat completions."""

    kind = "chat.completion"
    kind_of_chunk = "chat.completion.chunk"
    prefix = "chatcmpl"

    def __init__(self, model: GenerationModel, body: ChatBody, request: GenerationRequest) -> None:
        """Formats a model's texts, reasoning and tool calls."""
        super().__init__(model, body)
        self._request = request
        self._repeated = body.repeated
        self._readers: dict[int, AnswerReader] = {}

    def whole(self, answer: Answer[GeneratedText]) -> dict[str, Any]:
        """See `TextWriter`."""
        first = answer.results[0]
        return super().whole(answer) | self._prompt_ids(first.prompt_ids) | self._prompt_logprobs(first)

    def first(self, prompt_ids: NDArray[np.int64]) -> Iterator[dict[str, Any]]:
        """See `TextWriter`."""
        more = self._prompt_ids(prompt_ids)
        for index in range(self._body.n):
            self._readers[index] = self._model.answer_reader(self._request)
            yield self.chunk([self._chunk(index, {"role": "assistant", "content": self._repeated})]) | more
            more = {}

    def delta(self, delta: Delta) -> dict[str, Any] | None:
        """See `TextWriter`."""
        said = _fields(self._readers[delta.sample].feed(delta.output))
        return self._chunk(delta.sample, said, delta.tokens) if said or delta.tokens else None

    def last(self, text: GeneratedText) -> Iterator[dict[str, Any]]:
        """See `TextWriter`."""
        reader = self._readers[text.sample]
        if rest := _fields(reader.end()):
            yield self._chunk(text.sample, rest)
        yield self._chunk(text.sample, {}) | {"finish_reason": _finish_reason(text, reader)}

    def _chunk(self, index: int, delta: dict[str, Any], tokens: Sequence[TokenLogProbability] = ()) -> dict[str, Any]:
        delta = delta or ({"content": ""} if tokens else {})
        choice = {"index": index, "delta": delta, "logprobs": self._logprobs(tokens), "finish_reason": None}
        return choice | (self._token_ids(tokens) if tokens else {})

    def _choice(self, index: int, text: GeneratedText) -> dict[str, Any]:
        reader = self._model.answer_reader(self._request)
        message = _fields(reader.read(text.text))
        for call in message.get("tool_calls", ()):
            del call["index"]
        content = self._repeated + message.pop("content", "")
        return {
            "index": index,
            "message": {
                "role": "assistant",
                "content": content or (None if reader.call_ids else ""),
                "refusal": None,
                **message,
            },
            "logprobs": self._logprobs(text.result.tokens),
            "finish_reason": _finish_reason(text, reader),
            **self._token_ids(text.result.tokens),
        }

    def _logprobs(self, tokens: Sequence[TokenLogProbability]) -> dict[str, Any] | None:
        if not tokens or (number := self._body.num_top_tokens) is None:
            return None
        return {"content": self._tokens.entries(tokens, number), "refusal": None}


def _fields(content: AnswerDelta) -> dict[str, Any]:
    """Returns the fields of a message, or of a chunk's delta, without empty ones."""
    calls = [
        {"index": call.index}
        | ({"id": call.call_id, "type": "function"} if call.call_id else {})
        | {"function": ({"name": call.name} if call.name else {}) | {"arguments": call.arguments}}
        for call in content.calls
    ]
    fields = {"reasoning_content": content.reasoning, "content": content.text, "tool_calls": calls}
    return {name: value for name, value in fields.items() if value}


def _finish_reason(text: GeneratedText, reader: AnswerReader) -> str:
    reason = _REASONS[text.result.finish_reason]
    return "tool_calls" if reader.call_ids and reason == "stop" else reason


def _prompt_of(part: Delta | Answer[GeneratedText]) -> NDArray[np.int64]:
    """Returns the tokens of the prompt of a delta, or of an answer's first text."""
    prompt_ids = part.prompt_ids if isinstance(part, Delta) else part.results[0].prompt_ids
    assert prompt_ids is not None, "generation tells them"
    return prompt_ids
