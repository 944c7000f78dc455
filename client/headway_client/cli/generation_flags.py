"""The options that the commands of generation share: a dataclass of them instead of the same list in every command."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Annotated, Any

import typer

from headway_client.base import DEFAULT_TIMEOUT_S
from headway_client.channels import DEFAULT_SERVER
from headway_client.cli import parameters
from headway_client.options import StreamGenerateOptions

MinNewTokens = Annotated[
    int | None, typer.Option("--min-new-tokens", "--min-tokens", help="Tokens to produce before the text may end.")
]
Temperature = Annotated[float | None, typer.Option("--temperature", help="Softmax temperature; 0 is greedy.")]
TopK = Annotated[int | None, typer.Option("--top-k", help="Sample among the k most likely tokens.")]
TopP = Annotated[float | None, typer.Option("--top-p", help="Sample among the likeliest tokens of this mass.")]
MinP = Annotated[
    float | None, typer.Option("--min-p", help="Leave out tokens below this share of the likeliest one's probability.")
]
RepetitionPenalty = Annotated[
    float | None,
    typer.Option("--repetition-penalty", help="Above 1, tokens of prompt and text become less likely."),
]
PresencePenalty = Annotated[
    float | None, typer.Option("--presence-penalty", help="Taken from the logits of tokens that are in the text.")
]
FrequencyPenalty = Annotated[
    float | None, typer.Option("--frequency-penalty", help="The same, once for every time a token is in it.")
]
LogitBias = Annotated[
    list[str] | None,
    typer.Option("--logit-bias", metavar="ID=BIAS", help="Add BIAS to the logit of token ID; may be repeated."),
]
Seed = Annotated[int | None, typer.Option("--seed", help="Seed of the random stream.")]
Stop = Annotated[list[str] | None, typer.Option("--stop", help="Text that ends the output; may be repeated.")]
StopId = Annotated[
    list[int] | None, typer.Option("--stop-id", metavar="ID", help="Token that ends the output; may be repeated.")
]
JsonSchema = Annotated[
    str | None,
    typer.Option("--json-schema", metavar="FILE|JSON", help="JSON Schema that the output follows; JSON begins with {."),
]
Regex = Annotated[str | None, typer.Option("--regex", help="Regular expression that the whole output matches.")]
Choice = Annotated[list[str] | None, typer.Option("--choice", help="Text that the output may be; may be repeated.")]
LogProbabilities = Annotated[
    int | None,
    typer.Option(
        "--logprobs", metavar="N", help="Tell log-probabilities of tokens, and the N likeliest at each place."
    ),
]
PromptLogProbabilities = Annotated[
    bool, typer.Option("--prompt-logprobs", help="Tell those of the prompt's tokens too.")
]
Priority = Annotated[int, typer.Option("--priority", help="Place in the queue, -100 to 100: a higher one goes first.")]


@dataclass(frozen=True, kw_only=True)
class GenerationFlags:
    """What the commands of generation share, as it was given."""

    server: parameters.Server = DEFAULT_SERVER
    model: parameters.ModelName = ""
    model_version: parameters.ModelVersion = ""
    max_new_tokens: parameters.MaxNewTokens = None
    min_new_tokens: MinNewTokens = None
    temperature: Temperature = None
    top_k: TopK = None
    top_p: TopP = None
    min_p: MinP = None
    repetition_penalty: RepetitionPenalty = None
    presence_penalty: PresencePenalty = None
    frequency_penalty: FrequencyPenalty = None
    logit_bias: LogitBias = None
    seed: Seed = None
    stop: Stop = None
    stop_token_ids: StopId = None
    json_schema: JsonSchema = None
    regex: Regex = None
    choices: Choice = None
    log_probabilities: LogProbabilities = None
    prompt_log_probabilities: PromptLogProbabilities = False
    priority: Priority = 0
    truncate: parameters.Truncate = False
    timeout: parameters.Timeout = DEFAULT_TIMEOUT_S
    as_json: parameters.AsJson = False

    def options(self) -> StreamGenerateOptions:
        """Returns the options of a call.

        Raises:
            OSError: The file of the JSON Schema cannot be read.
            typer.BadParameter: A bias is not an id and a number.
        """
        return {
            "model": self.model,
            "model_version": self.model_version,
            "truncate": self.truncate,
            "max_new_tokens": self.max_new_tokens,
            "min_new_tokens": self.min_new_tokens,
            "temperature": self.temperature,
            "top_k": self.top_k,
            "top_p": self.top_p,
            "min_p": self.min_p,
            "repetition_penalty": self.repetition_penalty,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "logit_bias": _biases(self.logit_bias or ()),
            "seed": self.seed,
            "stop": self.stop or (),
            "stop_token_ids": self.stop_token_ids or (),
            "json_schema": None if self.json_schema is None else _schema(self.json_schema),
            "regex": self.regex,
            "choices": self.choices or None,
            "log_probabilities": self.log_probabilities,
            "prompt_log_probabilities": self.prompt_log_probabilities,
            "priority": self.priority,
        }


def takes_flags(command: Callable[..., None]) -> Callable[..., None]:
    """Gives a command, in the place of its argument `flags`, an option for every field of `GenerationFlags`."""
    shared = inspect.signature(GenerationFlags, eval_str=True).parameters
    own = inspect.signature(command, eval_str=True).parameters.values()

    @wraps(command)
    def run(**arguments: Any) -> None:
        flags = GenerationFlags(**{name: arguments.pop(name) for name in shared})
        command(**arguments, flags=flags)

    parameters_of_both = [*(parameter for parameter in own if parameter.name != "flags"), *shared.values()]
    run.__signature__ = inspect.Signature(parameters_of_both)  # type: ignore[attr-defined]  # what typer reads
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters_of_both}
    return run


def _biases(values: list[str] | tuple[()]) -> dict[int, float]:
    biases: dict[int, float] = {}
    for value in values:
        token_id, _, bias = value.partition("=")
        try:
            biases[int(token_id)] = float(bias)
        except ValueError:
            raise typer.BadParameter(
                f"{value!r} is not a token's id and a number, such as 17=-5", param_hint="--logit-bias"
            ) from None
    return biases


def _schema(value: str) -> str:
    """Returns the JSON text that was given, or that the file holds."""
    return value if value.lstrip().startswith("{") else Path(value).read_text(encoding="utf-8")
