"""OpenAI's requests, validated once and converted to requests of tasks.

Unsupported fields that would change the answer are refused by name. Fields without effect are accepted. A null field
counts as left out.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Collection, Sequence
from typing import Annotated, Any, ClassVar, Final, Literal

import numpy as np
from pydantic import AliasChoices, BaseModel, Field, StringConstraints

from headway_server.decoding.constraints import ConstraintRequest
from headway_server.diffusion import DiffusionSampler
from headway_server.errors import FieldName, InvalidInputError
from headway_server.preprocessing import ChatTurn, PromptEnd, Tool, ToolCall, TurnImage
from headway_server.preprocessing.chat import Role
from headway_server.serving.limits import check_count
from headway_server.tasks.generation.request import MAX_PROMPTS, MAX_TURNS, GenerationRequest, Prompt, ToolUse
from headway_server.tasks.generation.tools import MAX_TOOLS, TOOL_NAME, ToolChoice, check_turn, make_tool, use_tools
from headway_server.tasks.image_generation.request import ImageGenerationRequest
from headway_server.tasks.parameters import MAX_LOGIT_BIASES, LogProbabilityRequest, check_rules
from headway_server.tasks.synthesis.encoding import AudioFormat
from headway_server.tasks.synthesis.request import SynthesisRequest
from headway_server.tasks.text.model import TextInputs, TokenInputs
from headway_server.transports.http.body import Body, Many, Part

TokenId = Annotated[int, Field(ge=0, lt=2**31)]
_Tokens = Annotated[Many[TokenId], Field(min_length=1)]
ToolName = Annotated[str, StringConstraints(pattern=TOOL_NAME)]
ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]

_ROLES: Final[dict[str, Role]] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}
_SAME_NAME: Final = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "thinking_token_budget",
)
MAX_INPUTS: Final = 2_048
"""Maximum inputs of an embeddings call, as of OpenAI's."""
_ANY_OBJECT: Final = '{"type":"object"}'


def _schema(given: str | dict[str, Any] | None) -> str | None:
    """Returns a JSON schema as text."""
    return json.dumps(given) if isinstance(given, dict) else given


class ModelBody(Body):
    """A request."""

    union_tags: ClassVar = frozenset({"json_object"})
    without_effect: ClassVar = frozenset(
        {
            "metadata",
            "prompt_cache_key",
            "prompt_cache_options",
            "prompt_cache_retention",
            "safety_identifier",
            "service_tier",
            "store",
            "user",
        }
    )
    """Bookkeeping of the provider: identities, tiers, storage."""

    model: str
    """A model's name or alias, or `name/version`."""

    @property
    def name_and_version(self) -> tuple[str, str]:
        """Name and version of the model; an empty version is the default one."""
        name, _, version = self.model.partition("/")
        return name, version


class StructuredOutputs(Part):
    """The structure of an answer, as vLLM's clients send it."""

    json_schema: str | dict[str, Any] | None = Field(default=None, alias="json")
    json_object: bool = False
    regex: str | None = None
    choice: Many[str] | None = None


class StreamOptions(Part):
    """Options of a stream."""

    without_effect: ClassVar = frozenset({"include_obfuscation"})

    include_usage: bool = False
    continuous_usage_stats: bool = False
    """An extension of vLLM: every event has the token counts so far."""


class SamplingBody(ModelBody):
    """Common fields of all calls that generate text. Those from `top_k` on are this server's own, or vLLM's."""

    seed: int | None = None
    stop: str | Many[str] = Field(default_factory=list)
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Annotated[
        dict[Annotated[str, StringConstraints(pattern=r"^[0-9]{1,9}$")], float], Field(max_length=MAX_LOGIT_BIASES)
    ] = Field(default_factory=dict)
    stream: bool = False
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    thinking_token_budget: int | None = None
    stop_token_ids: Many[TokenId] = Field(default_factory=list)
    cache_salt: str = ""
    priority: int = 0
    truncate: bool = False
    truncate_prompt_tokens: Literal[-1] | None = None
    """-1 is `truncate`."""
    ignore_eos: bool = False
    """True: the text ends at its maximum number of tokens, which has to be set."""
    skip_special_tokens: Literal[True] = True
    spaces_between_special_tokens: bool = True
    """Of special tokens, which no text includes."""
    include_stop_str_in_output: Literal[False] = False
    use_beam_search: Literal[False] = False
    structured_outputs: StructuredOutputs | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: Many[str] | None = None

    @property
    def truncates(self) -> bool:
        """True if the beginning of a prompt that is too long is cut."""
        return self.truncate or self.truncate_prompt_tokens is not None

    def _structure(self) -> ConstraintRequest | None:
        """Returns the constraint of vLLM's fields.

        Raises:
            InvalidInputError: Several are set.
        """
        outputs = self.structured_outputs or StructuredOutputs()
        given = {
            "structured_outputs.json": _schema(outputs.json_schema),
            "structured_outputs.json_object": _ANY_OBJECT if outputs.json_object else None,
            "structured_outputs.regex": outputs.regex,
            "structured_outputs.choice": outputs.choice,
            "guided_json": _schema(self.guided_json),
            "guided_regex": self.guided_regex,
            "guided_choice": self.guided_choice,
        }
        found = {name: value for name, value in given.items() if value is not None}
        if len(found) > 1:
            first, second, *_ = found
            raise InvalidInputError(second, f"is set together with {first}; set one")
        for name, value in found.items():
            if isinstance(value, list):
                return ConstraintRequest(choices=tuple(value), name=name)
            if name.endswith("regex"):
                return ConstraintRequest(regex=value, name=name)
            return ConstraintRequest(json_schema=value, name=name)
        return None

    def _parameters(self, max_new_tokens: int | None) -> dict[str, Any]:
        """Returns the set sampling parameters, by the names of `SamplingParameters`."""
        given = {name: value for name in _SAME_NAME if (value := getattr(self, name)) is not None}
        if self.top_k == -1:  # vLLM's word for all
            given["top_k"] = 0
        if max_new_tokens is not None:
            given["max_new_tokens"] = max_new_tokens
        if self.seed is not None:
            given["seed"] = self.seed % 2**64
        if self.min_tokens is not None:
            given["min_new_tokens"] = self.min_tokens
        if self.ignore_eos:
            if max_new_tokens is None:
                raise InvalidInputError("ignore_eos", "is set without ", FieldName("max_new_tokens"), "; set both")
            given["min_new_tokens"] = max_new_tokens
        if self.stop:
            given["stop_strings"] = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        if self.stop_token_ids:
            given["stop_token_ids"] = tuple(self.stop_token_ids)
        if self.logit_bias:
            given["logit_biases"] = tuple((int(token_id), bias) for token_id, bias in self.logit_bias.items())
        return given


class GenerationBody(SamplingBody):
    """Common fields of completions and chat completions."""

    without_effect: ClassVar = ModelBody.without_effect | {"prediction"}
    """`prediction` speeds up an answer and does not change it."""

    n: int = 1
    max_tokens: int | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool = False
    """As in vLLM: the answer has the tokens of the prompt and of each text."""
    prompt_logprobs: int | None = None
    """As in vLLM: the number of likeliest tokens at each position of the prompt."""

    @property
    def num_top_tokens(self) -> int | None:
        """Number of likeliest tokens at each position of a text; None: no log-probabilities are wanted."""
        raise NotImplementedError

    def _log_probabilities(self, *, echo: bool = False) -> LogProbabilityRequest | None:
        """Returns what the model is asked for; `echo` includes the prompt.

        Raises:
            InvalidInputError: `prompt_logprobs` is out of its range, or set in a stream.
        """
        of_prompt = self.prompt_logprobs
        if of_prompt is not None:
            check_rules("prompt_logprobs", of_prompt, "LogProbabilityOptions.top_token_count")
            if self.stream:
                raise InvalidInputError("prompt_logprobs", "is set together with stream; set one of the two")
        numbers = [number for number in (self.num_top_tokens, of_prompt) if number is not None]
        if not numbers and not self.return_token_ids:
            return None
        include_prompt = of_prompt is not None or (echo and self.num_top_tokens is not None)
        return LogProbabilityRequest(num_top_tokens=max(numbers, default=0), include_prompt=include_prompt)

    @property
    def includes_usage(self) -> bool:
        """True if a stream ends with token counts."""
        options = self.stream_options
        return options is not None and (options.include_usage or options.continuous_usage_stats)

    @property
    def counts_continuously(self) -> bool:
        """True if every event of a stream has the token counts so far."""
        return self.stream_options is not None and self.stream_options.continuous_usage_stats

    def _check_stream(self) -> None:
        if self.stream_options is not None and not self.stream:
            raise InvalidInputError("stream_options", "requires stream; set stream to true, or leave it out")


class CompletionBody(GenerationBody):
    """A request of `/v1/completions`."""

    prompt: str | _Tokens | Many[str] | Many[_Tokens]
    logprobs: int | None = None
    echo: bool = False
    best_of: int | None = None
    """Must be n: every continuation is returned."""

    @property
    def num_top_tokens(self) -> int | None:
        """See `GenerationBody`."""
        return self.logprobs

    @property
    def is_read_alone(self) -> bool:
        """True if the prompt is wanted alone, as in vLLM; a token is generated and not returned."""
        return self.echo and self.max_tokens == 0

    def prompts(self) -> tuple[list[Prompt], list[str]]:
        """Returns the prompts, and the name of each for error messages.

        Raises:
            InvalidInputError: There are too many.
        """
        prompts: list[Prompt]
        if isinstance(self.prompt, str):
            prompts, fields = [self.prompt], ["prompt"]
        elif self.prompt and isinstance(self.prompt[0], int):
            prompts, fields = [np.asarray(self.prompt, np.int64)], ["prompt"]
        else:
            check_count("prompt", len(self.prompt), MAX_PROMPTS)  # before each becomes an array
            prompts = [one if isinstance(one, str) else np.asarray(one, np.int64) for one in self.prompt]
            fields = [f"prompt[{index}]" for index in range(len(prompts))]
        return prompts, fields

    def request(self) -> GenerationRequest:
        """Returns the parameters for every prompt.

        Raises:
            InvalidInputError: A number is outside of its model-independent range.
        """
        self._check_stream()
        if self.best_of not in (None, self.n):
            raise InvalidInputError("best_of", f"is {self.best_of}; must be n, {self.n}: leave it out")
        parameters = self._parameters(1 if self.is_read_alone else self.max_tokens)
        if (constraint := self._structure()) is not None:
            parameters["constraint"] = constraint
        return GenerationRequest(
            parameters=parameters,
            sample_count=self.n,
            truncate=self.truncates,
            echo=self.echo,
            log_probabilities=self._log_probabilities(echo=self.echo),
            priority=self.priority,
            cache_salt=self.cache_salt,
        )


class TextPart(Part):
    """A text part of a message."""

    type: Literal["text"]
    text: str


class ImageUrl(Part):
    """An image as a data URL."""

    without_effect: ClassVar = frozenset({"detail"})

    url: str

    def image(self, field: str) -> TurnImage:
        """Decodes the image; `field` is its name in error messages.

        Raises:
            InvalidInputError: It is another URL, or not base64.
        """
        return image_of_url(self.url, f"{field}.url")


class ImagePart(Part):
    """An image of a message."""

    type: Literal["image_url"]
    image_url: ImageUrl

    def image(self, field: str) -> TurnImage:
        """See `ImageUrl`."""
        return self.image_url.image(f"{field}.image_url")


_BREAKS: Final = b" \t\r\n"
"""What encoders for mail put between the lines of base64."""


def image_of_url(url: str, field: str) -> TurnImage:
    """Decodes the image of a data URL (RFC 2397); `field` is its name in error messages.

    Raises:
        InvalidInputError: It is another URL, or not base64.
    """
    head, comma, body = url.partition(",")
    if not comma or not head.lower().startswith("data:") or not head.lower().endswith(";base64"):
        raise InvalidInputError(
            field, "is not a data URL, and this server fetches nothing; send data:image/jpeg;base64, and the image"
        )
    encoded = body.encode("ascii", "replace").translate(None, _BREAKS)
    try:
        return TurnImage(data=base64.b64decode(encoded, validate=True), field=field)
    except ValueError as error:
        raise InvalidInputError(field, f"is not base64 ({error}); encode the whole file") from None


class CalledFunction(Part):
    """Name and arguments of a tool call."""

    name: ToolName
    arguments: str


class CallPart(Part):
    """A tool call of the assistant."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction

    def call(self) -> ToolCall:
        """Converts the tool call."""
        return ToolCall(call_id=self.id, name=self.function.name, arguments=self.function.arguments)


class RefusalPart(Part):
    """A refusal of the assistant, read as text."""

    type: Literal["refusal"]
    refusal: str

    @property
    def text(self) -> str:
        """The refusal."""
        return self.refusal


class Message(Part):
    """A turn of a conversation."""

    without_effect: ClassVar = frozenset({"annotations", "refusal"})

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Many[TextPart | RefusalPart | ImagePart] | None = None
    reasoning_content: str | None = None
    """This server's own field: reasoning of an earlier answer."""
    tool_calls: Annotated[Many[CallPart], Field(max_length=MAX_TOOLS)] = Field(default_factory=list)
    tool_call_id: str | None = None
    name: str = ""

    @property
    def text(self) -> str:
        """Its text, with the parts joined."""
        content = self.content or ""
        if isinstance(content, str):
            return content
        return "".join(part.text for part in content if not isinstance(part, ImagePart))

    def parts(self, field: str) -> tuple[str | TurnImage, ...]:
        """Returns texts and images in their order; nothing if there are no images."""
        content = self.content
        if content is None or isinstance(content, str) or not any(isinstance(part, ImagePart) for part in content):
            return ()
        return tuple(
            part.image(f"{field}.content[{index}]") if isinstance(part, ImagePart) else part.text
            for index, part in enumerate(content)
        )

    def turn(self, field: str) -> ChatTurn:
        """Converts the message to a turn; `field` is its name in error messages.

        Raises:
            InvalidInputError: A role other than assistant has no content, or see `check_turn`.
        """
        if self.content is None and self.role != "assistant":
            raise InvalidInputError(f"{field}.content", "is missing; give a text")
        turn = ChatTurn(
            role=_ROLES[self.role],
            content=self.text,
            parts=self.parts(field),
            reasoning=self.reasoning_content or "",
            tool_calls=tuple(call.call() for call in self.tool_calls),
            tool_call_id=self.tool_call_id or "",
            name=self.name,
        )
        check_turn(turn, field)
        return turn


class Function(Part):
    """A function as a tool. Answers match its schema; unless `strict`, unsupported keywords are left to the model."""

    name: ToolName
    description: str = ""
    parameters: dict[str, Any] = Field(default_factory=dict)
    strict: bool = False


class ToolPart(Part):
    """A tool."""

    type: Literal["function"]
    function: Function

    def tool(self, field: str) -> Tool:
        """Converts the tool; `field` is its name in error messages.

        Raises:
            InvalidInputError: Its schema is not one of an object.
        """
        function = self.function
        return make_tool(
            function.name,
            function.description,
            function.parameters,
            field=f"{field}.function.parameters",
            is_strict=function.strict,
        )


class NamedFunction(Part):
    """A function by name."""

    name: str


class NamedChoice(Part):
    """The required tool."""

    type: Literal["function"]
    function: NamedFunction


class JsonSchema(Part):
    """Schema of an answer; name and description are not used."""

    name: str
    description: str | None = None
    json_schema: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class TextFormat(Part):
    """Any text, any JSON object, or JSON with a schema as clients of Text Generation Inference send it."""

    type: Literal["text", "json_object"]
    value: dict[str, Any] | None = None
    """The schema, of `json_object` alone."""


class JsonSchemaFormat(Part):
    """JSON with a schema."""

    type: Literal["json_schema"]
    json_schema: JsonSchema


class PromptEndFields(BaseModel):
    """Fields of vLLM about the end of a conversation's prompt."""

    add_generation_prompt: bool = True
    """False: the prompt ends with the last message, not with the beginning of an answer."""
    continue_final_message: bool = False
    """True: the model continues the last message."""

    def prompt_end(self) -> PromptEnd:
        """Returns the end of the prompt.

        Raises:
            InvalidInputError: Both are set.
        """
        if not self.continue_final_message:
            return PromptEnd.NEW_TURN if self.add_generation_prompt else PromptEnd.TURNS
        if self.add_generation_prompt and "add_generation_prompt" in self.model_fields_set:
            raise InvalidInputError(
                "continue_final_message", "is set together with add_generation_prompt; set one of the two"
            )
        return PromptEnd.OPEN_TURN


class ChatBody(GenerationBody, PromptEndFields):
    """A conversation to continue: a request of `/v1/chat/completions`, which that of `/v1/responses` is read as."""

    without_effect: ClassVar = GenerationBody.without_effect | {"verbosity"}

    messages: Annotated[Many[Message], Field(min_length=1, max_length=MAX_TURNS)]
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int | None = None
    response_format: Annotated[TextFormat | JsonSchemaFormat, Field(discriminator="type")] | None = None
    modalities: Many[Literal["text"]] = Field(default_factory=list)
    tools: Annotated[Many[ToolPart], Field(max_length=MAX_TOOLS)] = Field(default_factory=list)
    tool_choice: Literal["none", "auto", "required"] | NamedChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: ReasoningEffort | None = None
    """Passed to a chat template that reads it."""
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """This server's own field: variables of the chat template by name, such as `enable_thinking`."""
    echo: bool = False
    """True, as in vLLM: the answer begins with the last message, if it is the assistant's."""

    def conversation(self) -> tuple[ChatTurn, ...]:
        """Returns the conversation; errors are those of `Message.turn`."""
        return tuple(message.turn(f"messages[{index}]") for index, message in enumerate(self.messages))

    @property
    def num_top_tokens(self) -> int | None:
        """See `GenerationBody`."""
        return self.top_logprobs or 0 if self.logprobs else None

    @property
    def repeated(self) -> str:
        """The text that the answer begins with."""
        last = self.messages[-1]
        return last.text if self.echo and last.role == "assistant" else ""

    def request(self) -> GenerationRequest:
        """Returns the parameters for the conversation.

        Raises:
            InvalidInputError: Two fields exclude each other, or a number is out of its range.
        """
        self._check_stream()
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            raise InvalidInputError("max_tokens", "is set together with max_completion_tokens; set one")
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidInputError("top_logprobs", "requires logprobs; set logprobs to true, or leave it out")
        most = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        parameters = self._parameters(most)
        if (constraint := self._constraint()) is not None:
            parameters["constraint"] = constraint
        return GenerationRequest(
            parameters=parameters,
            sample_count=self.n,
            truncate=self.truncates,
            log_probabilities=self._log_probabilities(),
            priority=self.priority,
            cache_salt=self.cache_salt,
            tools=self._tools(),
            variables=self.chat_template_kwargs,
            hints={} if self.reasoning_effort is None else {"reasoning_effort": self.reasoning_effort},
            end=self.prompt_end(),
            shows_reasoning=True,
        )

    def _tools(self) -> ToolUse | None:
        """Returns the tools of the call; None for tool_choice none."""
        choice = self.tool_choice
        if not self.tools:
            for field in ("tool_choice", "parallel_tool_calls"):
                if getattr(self, field) not in (None, "none"):
                    raise InvalidInputError(field, "is set without tools; give some, or leave it out")
            return None
        return use_tools(
            [tool.tool(f"tools[{index}]") for index, tool in enumerate(self.tools)],
            choice=ToolChoice(choice) if isinstance(choice, str) else ToolChoice.AUTO,
            required_name=choice.function.name if isinstance(choice, NamedChoice) else "",
            allows_several=self.parallel_tool_calls is not False,
            name_field="tool_choice.function.name",
        )

    def _constraint(self) -> ConstraintRequest | None:
        wanted, structure = self.response_format, self._structure()
        if isinstance(wanted, TextFormat) and wanted.type == "text" and wanted.value is not None:
            raise InvalidInputError("response_format.value", "requires the type json_object; leave it out")
        if wanted is None or wanted.type == "text":
            return structure
        if structure is not None:
            raise InvalidInputError("response_format", "is set together with structured outputs; set one")
        if isinstance(wanted, JsonSchemaFormat):
            schema, name = wanted.json_schema.json_schema, "response_format.json_schema.schema"
            return ConstraintRequest(json_schema=json.dumps(schema), name=name)
        if wanted.value is None:
            return ConstraintRequest(json_schema=_ANY_OBJECT, name="response_format")
        return ConstraintRequest(json_schema=json.dumps(wanted.value), name="response_format.value")


class ImageBody(ModelBody):
    """A request of `/v1/images/generations`; the last five are this server's own."""

    prompt: str
    n: int = 1
    response_format: Literal["b64_json", "url"] = "b64_json"
    """A `url` is a data URL."""
    output_format: Literal["png"] = "png"
    size: str = "auto"
    negative_prompt: str = ""
    step_count: int | None = None
    guidance_scale: float | None = None
    sampler: Annotated[DiffusionSampler, Field(strict=False)] | None = None
    seed: int | None = None

    def request(self, width: int, height: int, **more: Any) -> ImageGenerationRequest:
        """Returns the parameters for a model with this image size, with more of them by name.

        Raises:
            InvalidInputError: Another size is requested, or a value is out of its range.
        """
        if self.size not in ("auto", own := f"{width}x{height}"):
            raise InvalidInputError("size", f"is {self.size[:32]!r}; this model generates {own}: leave it out")
        given = {
            "num_steps": self.step_count,
            "guidance_scale": self.guidance_scale,
            "sampler": self.sampler,
            "seed": None if self.seed is None else self.seed % 2**64,
        }
        return ImageGenerationRequest(
            prompt=self.prompt,
            negative_prompt=self.negative_prompt,
            num_images=self.n,
            **{name: value for name, value in (given | more).items() if value is not None},
        )


class ImageEditBody(ImageBody):
    """The fields of `/v1/images/edits` that are no files; `strength` is this server's own, too."""

    without_effect: ClassVar = ImageBody.without_effect | {"input_fidelity"}

    strength: float | None = None

    def request(self, width: int, height: int, **more: Any) -> ImageGenerationRequest:
        """See `ImageBody`."""
        return super().request(width, height, strength=self.strength, **more)


class SpeechBody(ModelBody):
    """A request of `/v1/audio/speech`; the last six are this server's own."""

    input: str
    voice: str = ""
    response_format: Literal["mp3", "wav", "flac", "opus", "pcm"] = "mp3"
    stream_format: Literal["audio"] = "audio"
    speed: float = 1.0
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    max_duration_seconds: float | None = None

    def request(self, voices: Sequence[str]) -> SynthesisRequest:
        """Returns the parameters of the synthesis; `pcm` is streamed.

        OpenAI's clients always name a voice, so that of a model without names of voices is ignored.
        """
        given = {
            "temperature": self.temperature,
            "top_k": self.top_k,
            "top_p": self.top_p,
            "min_p": self.min_p,
            "seed": None if self.seed is None else self.seed % 2**64,
        }
        is_pcm = self.response_format == "pcm"
        return SynthesisRequest(
            voice=self.voice if voices else "",
            sampling={name: value for name, value in given.items() if value is not None},
            speaking_rate=self.speed,
            max_seconds=self.max_duration_seconds,
            format=AudioFormat.WAV if is_pcm else AudioFormat[self.response_format.upper()],
        )


_PROMPTS_OF_TYPES: Final = {"query": ("query", "search_query"), "document": ("document", "passage", "search_document")}
"""Names of models' prompts for Voyage's types of inputs."""


class EmbeddingBody(ModelBody):
    """A request of `/v1/embeddings`; `truncate` and `prompt_name` are this server's own."""

    input: str | _Tokens | Many[str] | Many[_Tokens]
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = None
    truncate: bool | None = Field(default=None, validation_alias=AliasChoices("truncate", "truncation"))
    """`truncation` is Voyage's name. Default: False, and True in a request of Voyage's."""
    prompt_name: str = ""
    input_type: Literal["query", "document"] | None = None
    """Voyage's: what a text is, and so the prompt before it, where the model has one for that."""

    def prompt_of(self, names: Collection[str]) -> str:
        """Returns the name of the prompt, of those that a model has.

        Raises:
            InvalidInputError: It is given in two ways.
        """
        if self.input_type is None:
            return self.prompt_name
        if self.prompt_name:
            raise InvalidInputError("prompt_name", "is set together with input_type; set one")
        return next((name for name in _PROMPTS_OF_TYPES[self.input_type] if name in names), "")

    def inputs(self) -> TextInputs | TokenInputs:
        """Returns the texts, or the token ids of each text.

        Raises:
            InvalidInputError: There are none, or too many.
        """
        given: Sequence[Any] = self.input
        if isinstance(self.input, str) or (self.input and isinstance(self.input[0], int)):
            given = [self.input]
        check_count("input", len(given), MAX_INPUTS)
        fields = ["input"] if given != self.input else [f"input[{index}]" for index in range(len(given))]
        if isinstance(given[0], str):
            truncate = self.input_type is not None if self.truncate is None else self.truncate
            return TextInputs(texts=given, fields=fields, truncate=truncate)
        return TokenInputs(input_ids=[np.asarray(one, np.int64) for one in given], fields=fields)
