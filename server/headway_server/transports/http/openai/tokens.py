"""Tokens of prompts and texts of tokens, in vLLM's form."""

from __future__ import annotations

from typing import Annotated, Any, Final

import numpy as np
from pydantic import Field

from headway_server.errors import InvalidInputError
from headway_server.services.images import images_of_prompts
from headway_server.serving.host import ModelHost
from headway_server.tasks.generation.request import MAX_TURNS, Prompt
from headway_server.tasks.generation.tools import MAX_TOOLS
from headway_server.tasks.table import GENERATE_TEXTS
from headway_server.transports.http.body import Many
from headway_server.transports.http.edge import Reply, Request, to_json
from headway_server.transports.http.openai.form import MAX_NUMBERS_ON_LOOP, formatted
from headway_server.transports.http.openai.requests import Message, ModelBody, PromptEndFields, TokenId, ToolPart

TOKENIZE_PATH: Final = "/tokenize"
DETOKENIZE_PATH: Final = "/detokenize"


class TokenizeBody(ModelBody, PromptEndFields):
    """A request of `/tokenize`: a prompt, or a conversation."""

    model: str = ""
    prompt: str | None = None
    messages: Annotated[Many[Message], Field(min_length=1, max_length=MAX_TURNS)] | None = None
    tools: Annotated[Many[ToolPart], Field(max_length=MAX_TOOLS)] = Field(default_factory=list)
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    add_special_tokens: bool | None = None
    """Default: True for a prompt. A chat template writes its own."""
    return_token_strs: bool = False

    def given(self) -> tuple[Prompt, str]:
        """Returns the prompt or conversation, and its name for error messages.

        Raises:
            InvalidInputError: There is none, or both.
        """
        if self.messages is None:
            if self.prompt is None:
                raise InvalidInputError("prompt", "is missing; give it, or messages")
            for field in ("tools", "chat_template_kwargs"):
                if getattr(self, field):
                    raise InvalidInputError(field, "is set with a prompt; give messages, or leave it out")
            return self.prompt, "prompt"
        if self.prompt is not None:
            raise InvalidInputError("prompt", "is set together with messages; set one")
        if self.add_special_tokens:
            raise InvalidInputError("add_special_tokens", "is set, and the chat template writes them; leave it out")
        return tuple(message.turn(f"messages[{index}]") for index, message in enumerate(self.messages)), "messages"


class DetokenizeBody(ModelBody):
    """A request of `/detokenize`."""

    model: str = ""
    tokens: Many[TokenId]


class TokenEndpoint:
    """Answers from a host's models that generate text."""

    def __init__(self, host: ModelHost) -> None:
        self._host = host

    async def tokenize(self, request: Request) -> Reply:
        """Returns the tokens of a prompt, as the model would read it."""
        body = await request.parse(TokenizeBody.read)
        model = self._host.find_able(GENERATE_TEXTS, *body.name_and_version)
        prompt, field = body.given()
        images = await images_of_prompts(self._host, [prompt])
        tokens = await model.tokenize(
            prompt,
            field=field,
            images=images[0] if images else (),
            add_special_tokens=body.add_special_tokens is not False,
            tools=[tool.tool(f"tools[{index}]") for index, tool in enumerate(body.tools)],
            variables=body.chat_template_kwargs,
            end=body.prompt_end(),
        )
        return await formatted(
            lambda: {
                "count": len(tokens),
                "max_model_len": model.limits.max_total_tokens,
                "tokens": tokens,
                "token_strs": [model.token_piece(token) for token in tokens] if body.return_token_strs else None,
            },
            is_long=len(tokens) > MAX_NUMBERS_ON_LOOP,
        )

    async def detokenize(self, request: Request) -> Reply:
        """Returns the text of tokens."""
        body = await request.parse(DetokenizeBody.read)
        model = self._host.find_able(GENERATE_TEXTS, *body.name_and_version)
        text = await model.detokenize(np.asarray(body.tokens, np.int64), field="tokens")
        return Reply(body=to_json({"prompt": text}))

    def __repr__(self) -> str:
        return f"TokenEndpoint({self._host!r})"
