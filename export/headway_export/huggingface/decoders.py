"""Causal language models, whose attention follows ours.

Their layers call the `attend` that `HuggingFaceDecoder` is given (`attention.py`), so that any decoder of the library
follows docs/bring-your-own.md.

A decoder is held against `transformers`' own attention before it is exported, so a family that computes anything beside
what `attend` takes is refused with the difference.

B rows, T tokens, H heads, G key and value heads, K head width, D model width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
from headway_export.reference import CAUSAL, OwnText, generation_logits
from headway_export.source import ExportSource
from headway_server.bundles import SamplingDefaults, SpecialTokens
from headway_training.folders import first_line, plain_tokenizer, quiet
from headway_training.models.parts.attention import Attend, TextScoring

_ATTENTION_LAYERS: Final = frozenset(("full_attention", "sliding_attention"))
_APPLIED: Final = ("do_sample", *SAMPLING, "max_new_tokens", "repetition_penalty")
_ASKED_FOR: Final = {name: name for name in ("min_new_tokens", "stop_strings")} | {"max_length": "max_new_tokens"}
"""Settings of generation that a bundle has no defaults for, and what calls call them."""


class HuggingFaceDecoder(nn.Module):
    """A causal language model of `transformers` as a `Decoder`."""

    def __init__(self, model: nn.Module, *, max_length: int) -> None:
        super().__init__()
        self.model = model
        self.max_length = max_length
        config = cast("Any", model).config
        self._divisor = float(getattr(config, "logits_scaling", None) or 1.0)
        self._factor = float(getattr(config, "logit_scale", None) or 1.0)
        self._cap = getattr(config, "final_logit_softcapping", None)

    def hidden_states(self, input_ids: Tensor, position_ids: Tensor, attend: Attend) -> Tensor:
        """(B, T), (B, T) -> (B, T, D)."""

        def attend_layer(
            module: nn.Module, query: Tensor, key: Tensor, value: Tensor, **scoring: Unpack[TextScoring]
        ) -> Tensor:
            without(scoring, "bias")
            if value.shape[-1] != key.shape[-1]:
                raise SourceError(_two_widths(key.shape[-1], value.shape[-1]))
            return attend(query, key, value, layer=layer_of(module), **scoring)

        with attending(attend_layer):
            output = cast("Any", self.model).base_model(
                input_ids=input_ids, position_ids=position_ids, use_cache=False, return_dict=True
            )
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
    module = HuggingFaceDecoder(model, max_length=length)
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
    layers = set(getattr(config, "layer_types", None) or ())
    may_keep_state = getattr(model_class, "_is_stateful", False)
    may_keep_state = may_keep_state and not (layers and layers <= _ATTENTION_LAYERS)  # a class may have both kinds
    if may_keep_state or "linear_attention" in layers:
        raise SourceError(
            f"{path}: has layers that keep a recurrent state ({config.model_type}: a state-space model, linear "
            "attention or the like); a bundle's decoder keeps keys and values, so this family is not supported"
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


def _check_against_own_attention(folder: ModelFolder, decoder: HuggingFaceDecoder) -> None:
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
    if (layers := int(model.config.get_text_config().num_hidden_layers)) != len(attending):
        raise SourceError(
            f"{folder.path}: {kind}: {len(attending)} of {layers} layers attend through the interface that "
            "transformers has for it; a key/value cache needs all of them, so this family is not supported"
        )
    model.set_attn_implementation("eager")
    try:
        with torch.inference_mode():
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
