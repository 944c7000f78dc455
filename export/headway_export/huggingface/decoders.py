"""Causal language models, whose attention follows ours.

Their layers call the `attend` that `HuggingFaceDecoder` is given (`attention.py`), so that any decoder of the library
follows docs/bring-your-own.md.

A decoder is held against `transformers`' own attention before it is exported, so a family that computes anything beside
what `attend` takes is refused with the difference.

B rows, T tokens, H heads, G key and value heads, K head width, D model width, V vocabulary.
"""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any, Final, Unpack, cast

import numpy as np
import torch
import transformers
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from headway_export.errors import SourceError
from headway_export.huggingface.attention import ATTENTION, asked_logits, attending, check_logits, layer_of, without
from headway_export.huggingface.conversations import read_chat_template
from headway_export.huggingface.experts import give_experts, has_experts
from headway_export.huggingface.folder import ModelFolder, as_ids, check_is_dense
from headway_export.huggingface.settings import SAMPLING, generation_notes
from headway_export.huggingface.states import knows_states_of, reading
from headway_export.reference import CAUSAL, OwnText, generation_logits
from headway_export.source import ExportSource
from headway_server.bundles import SamplingDefaults, SpecialTokens
from headway_training.folders import first_line, plain_tokenizer, quiet
from headway_training.models.parts.attention import Attend, TextScoring

_ATTENTION_LAYERS: Final = frozenset(("full_attention", "sliding_attention"))
_APPLIED: Final = ("do_sample", *SAMPLING, "max_new_tokens", "repetition_penalty")
_ASKED_FOR: Final = {name: name for name in ("min_new_tokens", "stop_strings")} | {"max_length": "max_new_tokens"}
"""Settings of generation that a bundle has no defaults for, and what calls call them."""


class _HuggingFaceText(nn.Module):
    """A causal language model of `transformers` whose attention is given from outside."""

    def __init__(self, model: nn.Module, *, max_length: int) -> None:
        super().__init__()
        self.model = model
        self.max_length = max_length
        config = cast("Any", model).config
        self._divisor = float(getattr(config, "logits_scaling", None) or 1.0)
        factors = [getattr(config, name, None) or 1.0 for name in ("logit_scale", "lm_head_multiplier")]
        self._factor = float(math.prod(factors))
        self._cap = getattr(config, "final_logit_softcapping", None)

    def _read(self, input_ids: Tensor, attend: Attend, number: Callable[[nn.Module], int], **given: Any) -> Tensor:
        """(B, T) -> (B, T, D); `number` tells the number of a layer that attends."""

        def attend_layer(
            module: nn.Module, query: Tensor, key: Tensor, value: Tensor, **scoring: Unpack[TextScoring]
        ) -> Tensor:
            without(scoring, "bias")
            if value.shape[-1] != key.shape[-1]:
                raise SourceError(_two_widths(key.shape[-1], value.shape[-1]))
            return attend(query, key, value, layer=number(module), **scoring)

        with attending(attend_layer):
            output = cast("Any", self.model).base_model(input_ids=input_ids, return_dict=True, **given)
        return cast("Tensor", output.last_hidden_state)

    def logits(self, hidden_states: Tensor) -> Tensor:
        """(..., D) -> (..., V)."""
        logits: Tensor = cast("Any", self.model).get_output_embeddings()(hidden_states)
        if self._divisor != 1.0:
            logits = logits / self._divisor
        if self._factor != 1.0:
            logits = logits * self._factor
        if self._cap is not None:
            logits = torch.tanh(logits / self._cap) * self._cap
        return logits


class HuggingFaceDecoder(_HuggingFaceText):
    """A causal language model of `transformers` as a `Decoder`."""

    def hidden_states(self, input_ids: Tensor, position_ids: Tensor, attend: Attend) -> Tensor:
        """(B, T), (B, T) -> (B, T, D)."""
        return self._read(input_ids, attend, layer_of, position_ids=position_ids, use_cache=False)


class _StatefulHuggingFace(_HuggingFaceText):
    """A causal language model of `transformers` with states in some of its layers, or in all."""

    def __init__(self, model: nn.Module, *, max_length: int) -> None:
        super().__init__(model, max_length=max_length)
        parameters = inspect.signature(cast("Any", model).base_model.forward).parameters
        self._cache_name = next(name for name in ("cache_params", "past_key_values") if name in parameters)
        self._takes_positions = "position_ids" in parameters
        self.num_attending = 0
        """Layers that attend."""
        ids = torch.zeros(1, 2, dtype=torch.int64)
        with torch.inference_mode():
            _, present = self._step(ids, torch.arange(2)[None], self._note, None)
        self._first = [torch.zeros_like(state[0]) for state in present]

    def _note(self, query: Tensor, key: Tensor, value: Tensor, *, layer: int, **_: Any) -> Tensor:  # noqa: ARG002
        self.num_attending = layer + 1
        return query

    def first_states(self, rows: int) -> list[Tensor]:
        """Returns zeros, (B, ...) each."""
        return [state.new_zeros((rows, *state.shape)) for state in self._first]

    def _step(
        self, input_ids: Tensor, position_ids: Tensor, attend: Attend, states: Sequence[Tensor] | None
    ) -> tuple[Tensor, list[Tensor]]:
        """(B, T), (B, T), the states before -> (B, T, D), the states after.

        Layers that attend are numbered as they are called: a layer may be used several times, each with its own cache.
        """
        calls = itertools.count()
        with reading(self.model, states) as cache:
            given: dict[str, Any] = {self._cache_name: cache, "use_cache": True}
            if self._takes_positions:
                given["position_ids"] = position_ids
            return self._read(input_ids, attend, lambda _: next(calls), **given), cache.present


class HuggingFaceHybrid(_StatefulHuggingFace):
    """A causal language model of `transformers` as a `HybridDecoder`."""

    def read_attending(
        self, input_ids: Tensor, position_ids: Tensor, attend: Attend, states: list[Tensor]
    ) -> tuple[Tensor, list[Tensor]]:
        """(B, T), (B, T), the states before -> (B, T, D), the states after."""
        return self._step(input_ids, position_ids, attend, states)


class HuggingFaceRecurrent(_StatefulHuggingFace):
    """A causal language model of `transformers` as a `StatefulDecoder`."""

    def read(self, input_ids: Tensor, states: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """(B, T), the states before -> (B, T, D), the states after."""
        return self._step(input_ids, torch.zeros_like(input_ids), self._note, states)


def _adapted(model: nn.Module, owner: str, *, max_length: int) -> _HuggingFaceText:
    """Returns a causal language model as a decoder of its kind.

    Raises:
        SourceError: The states of `owner` are none that are known here.
    """
    if not _keeps_states(cast("Any", model).config.get_text_config(), type(model)):
        return HuggingFaceDecoder(model, max_length=max_length)
    try:
        hybrid = HuggingFaceHybrid(model, max_length=max_length)
        return hybrid if hybrid.num_attending else HuggingFaceRecurrent(model, max_length=max_length)
    except SourceError as error:
        raise SourceError(f"{owner}: {type(model).__name__}: {error}; this family is not supported") from error
    except Exception as error:  # whatever its code raises
        raise SourceError(
            f"{owner}: {type(model).__name__} does not run with injected attention ({first_line(error)})"
        ) from error


class OwnDecoder(OwnText):
    """A causal language model of `transformers` with its own attention."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def text_logits(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        """(1, T), (P,) -> (1, P, V)."""
        with asked_logits(self.model, positions):
            return cast("Tensor", self.model(input_ids=input_ids, use_cache=False, return_dict=True).logits)

    def text_attention(self, input_ids: Tensor) -> tuple[Tensor, ...]:
        """(1, T) -> (1, H, T, T) of each layer."""
        output = self.model(input_ids=input_ids, use_cache=False, output_attentions=True, return_dict=True)
        return cast("tuple[Tensor, ...]", output.attentions)


def read_decoder(folder: ModelFolder) -> tuple[ExportSource, tuple[str, ...]]:
    """Reads a causal language model.

    Raises:
        SourceError: The folder is incomplete, or its model is none that can be served.
    """
    own = folder.own_tokenizer()
    tokenizer = plain_tokenizer(own)
    special_tokens, defaults, more_notes = _generation_settings(folder, tokenizer)
    chat_template, chat_notes = read_chat_template(folder, own, tokenizer, special_tokens)
    model = folder.load(AutoModelForCausalLM, attention=ATTENTION)
    give_experts(model, str(folder.path))
    length, notes = folder.length(model)
    module = _adapted(model, str(folder.path), max_length=length)
    _check_against_own_attention(folder, module)
    return (
        folder.source(
            model,
            module,
            make_reference=lambda: OwnDecoder(folder.load(AutoModelForCausalLM)),
            tokenizer=tokenizer,
            special_tokens=special_tokens,
            prompt_prefix=_prompt_prefix(tokenizer),
            chat_template=chat_template,
            sampling_defaults=defaults,
            evaluation=folder.evaluation(),
        ),
        notes + more_notes + chat_notes,
    )


def _two_widths(key: int, value: int) -> str:
    return f"the values of its attention are {value} wide and the keys {key}, and a key/value cache has one width"


def check_decoder(path: Path, config: Any) -> None:
    """Checks what can be told of a causal language model by its configuration alone.

    Raises:
        SourceError: The model needs something that the exported graph does not compute.
    """
    config = config.get_text_config()
    model_class = transformers.MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if model_class is None or not has_experts(model_class):
        check_is_dense(path, config)
    if _keeps_states(config, model_class) and not (model_class and knows_states_of(model_class)):
        raise SourceError(
            f"{path}: has layers that keep a recurrent state in a way of their own ({config.model_type}); no operator "
            "for it is known here, so this family is not supported"
        )
    key_width, value_width = (getattr(config, name, None) for name in ("qk_head_dim", "v_head_dim"))
    if key_width is not None and value_width is not None and key_width != value_width:
        raise SourceError(f"{path}: {_two_widths(key_width, value_width)}")
    rope = getattr(config, "rope_parameters", None) or {}
    settings: Sequence[Any] = [rope, *(part for part in rope.values() if isinstance(part, Mapping))]
    kinds = {part.get("rope_type", part.get("type")) for part in settings}
    if changing := kinds & {"dynamic", "longrope"}:
        raise SourceError(
            f"{path}: its rotary positions are scaled by the running length ({changing.pop()}), so a cached key "
            "would have to change as the text grows; this is not supported"
        )


def _keeps_states(config: Any, model_class: type | None) -> bool:
    """Returns True if a decoder has, or may have, layers that keep a state beside keys and values."""
    layers = set(getattr(config, "layer_types", None) or ())
    may_keep = getattr(model_class, "_is_stateful", False) and not layers  # a class may have both kinds
    return may_keep or not layers <= _ATTENTION_LAYERS


def _check_against_own_attention(folder: ModelFolder, decoder: _HuggingFaceText) -> None:
    """Compares the logits of an adapted decoder with those of `transformers` itself, on random tokens.

    Raises:
        SourceError: They differ: the family computes something that does not go through `attend`.
    """
    model = cast("Any", decoder.model)
    kind = type(model).__name__
    length = min(max(48, (_window_of(model.config) or 0) + 16), decoder.max_length)
    ids = np.random.default_rng(0).integers(0, model.config.get_text_config().vocab_size, length)
    attending: set[int] = set()

    def noting(query: Tensor, key: Tensor, value: Tensor, *, layer: int, **scoring: Unpack[TextScoring]) -> Tensor:
        attending.add(layer)
        return CAUSAL(query, key, value, layer=layer, **scoring)

    try:
        with quiet():
            found = generation_logits(decoder, ids, noting)
    except SourceError as error:
        raise SourceError(f"{folder.path}: {kind}: {error}") from error
    except Exception as error:  # whatever its code raises
        if attending:  # else it attends in its own way, which is said below
            raise SourceError(
                f"{folder.path}: {kind} does not run with injected attention ({first_line(error)})"
            ) from error
    layers = int(model.config.get_text_config().num_hidden_layers)
    if isinstance(decoder, HuggingFaceDecoder) and layers != len(attending):
        raise SourceError(
            f"{folder.path}: {kind}: {len(attending)} of {layers} layers attend through the interface that "
            "transformers has for it; a key/value cache needs all of them, so this family is not supported"
        )
    model.set_attn_implementation("eager")
    try:
        with quiet(), torch.inference_mode():
            expected = model(input_ids=torch.from_numpy(ids)[None], use_cache=False).logits[0].float().numpy()
    finally:
        model.set_attn_implementation(ATTENTION)
    check_logits(found, expected, f"{folder.path}: {kind}")


def _window_of(config: Any) -> int | None:
    """Returns the sliding window of a decoder's attention, in tokens; None: it has none."""
    config = config.get_text_config()
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    if window is None or (kinds is not None and "sliding_attention" not in kinds):
        return None
    return None if getattr(config, "use_sliding_window", True) is False else int(window)


def _prompt_prefix(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Returns the tokens that a tokenizer puts before a text."""
    framed = tokenizer.encode("a")
    marks = zip(framed.ids, framed.special_tokens_mask, strict=True)
    return tuple(index for index, _ in takewhile(lambda mark: mark[1], marks))


def _generation_settings(
    folder: ModelFolder, tokenizer: Tokenizer
) -> tuple[SpecialTokens, SamplingDefaults, tuple[str, ...]]:
    """Reads `generation_config.json`, or what the configuration says in its place."""
    text = folder.config.get_text_config()
    settings = folder.generation_config()
    size = int(text.vocab_size)
    stated = as_ids(settings.eos_token_id) or as_ids(text.eos_token_id)
    ends = [end for end in stated if end < size]
    begins = as_ids(settings.bos_token_id)
    names = folder.token_names()
    turn_end = tokenizer.token_to_id(names["eos_token"]) if "eos_token" in names else None
    if turn_end in ends:  # the template knows this one as eos_token
        ends = [turn_end, *(end for end in ends if end != turn_end)]
    begin = tokenizer.token_to_id(names["bos_token"]) if "bos_token" in names else None
    special = SpecialTokens(
        pad=settings.pad_token_id,
        bos=begin if begin is not None else next((one for one in begins if one < size), None),
        eos=ends[0] if ends else None,
        more_eos=tuple(ends[1:]),
    )
    values: dict[str, Any] = {"max_new_tokens": settings.max_new_tokens}
    if settings.repetition_penalty is not None:
        values["repetition_penalty"] = settings.repetition_penalty
    if settings.do_sample:
        values["temperature"] = 1.0 if settings.temperature is None else settings.temperature
        values["top_k"] = min(50 if settings.top_k is None else settings.top_k, size)  # as `generate` does
        values |= {name: getattr(settings, name) for name in ("top_p", "min_p") if getattr(settings, name) is not None}
    notes = generation_notes(settings, applied=_APPLIED, asked=_ASKED_FOR)
    if never := [f"eos_token_id {end}" for end in stated if end >= size]:
        notes += (f"generation_config: {', '.join(never)}: left out, since the model has {size} tokens",)
    return special, SamplingDefaults.model_validate(values), notes
