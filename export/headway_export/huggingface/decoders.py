"""Causal language models, whose attention follows ours.

Their layers call the `attend` that `HuggingFaceDecoder` is given (`attention.py`, `written_attention.py`), so that any
decoder of the library follows docs/bring-your-own.md. Of a model that also sees or hears, the language model is taken.

A decoder is held against `transformers`' own attention before it is exported, so a family that computes anything beside
what `attend` takes is refused with the difference.

B rows, T tokens, H heads, G key and value heads, K head width, D model width, V vocabulary.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count, takewhile
from pathlib import Path
from typing import Any, Final, Protocol, Unpack, cast

import numpy as np
import torch
import transformers
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForMultimodalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

from headway_export.errors import SourceError
from headway_export.huggingface.attention import (
    ATTENTION,
    asked_logits,
    attend_in_one_width,
    attending,
    check_logits,
    running,
)
from headway_export.huggingface.conversations import read_chat_template
from headway_export.huggingface.experts import give_experts, has_experts
from headway_export.huggingface.folder import ModelFolder, as_ids, check_is_dense
from headway_export.huggingface.settings import SAMPLING, generation_notes
from headway_export.huggingface.states import knows_states_of, reading
from headway_export.huggingface.written_attention import (
    WrittenCache,
    own_attention,
    standing_masks,
    writes_attention,
)
from headway_export.reference import CAUSAL, OwnText, generation_logits
from headway_export.source import ExportSource
from headway_server.bundles import SamplingDefaults, SpecialTokens
from headway_training.folders import first_line, plain_tokenizer, quiet
from headway_training.models.parts.attention import Attend, TextScoring

_ATTENTION_LAYERS: Final = frozenset(("full_attention", "sliding_attention"))
_OTHER_ATTENTION: Final = frozenset((
    "chunked_attention", "indexed_attention", "compressed_sparse_attention", "heavily_compressed_attention",
    "minimax_m3_sparse",
))  # fmt: skip
"""What `transformers` calls layers that attend to a choice of the keys."""
_WINDOW_IN_MASK: Final = frozenset(("phimoe",))
"""Families whose layers do not name the window that their mask has."""
_MEDIA_TOKEN: Final = re.compile(
    r"(image|video|vision|audio|speech|boi|eoi|boa|eoa)\w*_token(_id|_index)$|^(boi|eoi)_token"
)
"""What configurations call tokens that stand for images and sounds."""
_APPLIED: Final = ("do_sample", *SAMPLING, "max_new_tokens", "repetition_penalty")
_ASKED_FOR: Final = {name: name for name in ("min_new_tokens", "stop_strings")} | {"max_length": "max_new_tokens"}
"""Settings of generation that a bundle has no defaults for, and what calls call them."""


class _HuggingFaceText(nn.Module):
    """A causal language model of `transformers` whose attention is given from outside."""

    def __init__(self, model: nn.Module, *, max_length: int) -> None:
        super().__init__()
        self.model = model
        self.max_length = max_length
        config = cast("Any", model).config.get_text_config()
        is_written = writes_attention(type(text_model(model))) and not _keeps_states(config, type(model))
        self._windows = _written_windows(config) if is_written else None
        self._window = config.sliding_window if config.model_type in _WINDOW_IN_MASK else None
        code = inspect.getsource(inspect.unwrap(type(model).forward))  # a model around another may leave these out
        divisor, *factors, self._cap = (
            getattr(config, name, None) if name in code else None
            for name in ("logits_scaling", "logit_scale", "lm_head_multiplier", "final_logit_softcapping")
        )
        self._divisor, self._factor = float(divisor or 1.0), math.prod(float(factor or 1.0) for factor in factors)
        self.biases = nn.ParameterList()
        if self._windows is not None:
            self._keep_biases()

    def _read(self, input_ids: Tensor, attend: Attend, **given: Any) -> Tensor:
        """(B, T) -> (B, T, D).

        Layers that attend are numbered as they are called: one of some families calls twice, and one that is used
        several times has a cache for each.
        """
        numbers = count()

        def attend_next(query: Tensor, key: Tensor, value: Tensor, **scoring: Unpack[TextScoring]) -> Tensor:
            layer = next(numbers)
            if self.biases:  # what the layer computes again at each step is not read
                scoring["bias"] = self.biases[min(layer, len(self.biases) - 1)]
            return attend_in_one_width(attend, query, key, value, layer=layer, **scoring)

        def attend_layer(
            module: nn.Module,  # noqa: ARG001 (calls are counted)
            query: Tensor,
            key: Tensor,
            value: Tensor,
            **scoring: Unpack[TextScoring],
        ) -> Tensor:
            if self._window is not None:
                scoring["window"] = self._window
            return attend_next(query, key, value, **scoring)

        tokens = {} if "inputs_embeds" in given else {"input_ids": input_ids}
        inputs = {**tokens, "return_dict": True, **given}
        text = text_model(self.model)
        if self._windows is None:
            with attending(attend_layer):
                output = text(**inputs)
        else:
            length = input_ids.shape[1]
            cache = WrittenCache(attend_next, length=length, num_keys=self.max_length, windows=self._windows)
            with standing_masks(self.model):
                output = text(**inputs, past_key_values=cache)
        return cast("Tensor", output.last_hidden_state)

    def _keep_biases(self) -> None:
        """Keeps what the layers add to their scores for all positions, (1, H, 1, S) each, or one that all share.

        Raises:
            SourceError: It depends on the query.
        """
        found: list[Tensor | None] = []

        def noting(query: Tensor, key: Tensor, value: Tensor, *, layer: int, **scoring: Unpack[TextScoring]) -> Tensor:
            assert (key.shape, layer) == (value.shape, len(found)), "they have one width, and layers are counted"
            found.append(scoring.get("bias"))
            return value.repeat_interleave(query.shape[2] // value.shape[2], dim=2)

        with torch.inference_mode():
            ids = torch.zeros(1, 2, dtype=torch.int64)
            self._read(ids, noting, position_ids=torch.arange(2)[None], use_cache=False)
        kept = [bias for bias in found if bias is not None]
        if len(kept) not in (0, len(found)) or any(bias.shape[2] != 1 for bias in kept):
            raise SourceError("its attention has a bias that depends on the query, which is not known here")
        if all(torch.equal(bias, kept[0]) for bias in kept):
            kept = kept[:1]
        self.biases.extend(nn.Parameter(bias.float().clone(), requires_grad=False) for bias in kept)

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
        return self._read(input_ids, attend, position_ids=position_ids, use_cache=False)


class _StatefulHuggingFace(_HuggingFaceText):
    """A causal language model of `transformers` with states in some of its layers, or in all."""

    def __init__(self, model: nn.Module, *, max_length: int) -> None:
        super().__init__(model, max_length=max_length)
        parameters = inspect.signature(text_model(model).forward).parameters
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
        """(B, T), (B, T), the states before -> (B, T, D), the states after."""
        with reading(self.model, states) as cache:
            given: dict[str, Any] = {self._cache_name: cache, "use_cache": True}
            if self._takes_positions:
                given["position_ids"] = position_ids
            return self._read(input_ids, attend, **given), cache.present


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


def _adapted(model: nn.Module, *, max_length: int) -> _HuggingFaceText:
    """Returns a causal language model as a decoder of its kind.

    Raises:
        SourceError: Its states are none that are known here.
    """
    if not _keeps_states(cast("Any", model).config.get_text_config(), type(model)):
        return HuggingFaceDecoder(model, max_length=max_length)
    hybrid = HuggingFaceHybrid(model, max_length=max_length)
    return hybrid if hybrid.num_attending else HuggingFaceRecurrent(model, max_length=max_length)


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


class Sight(Protocol):
    """What lets a decoder read images (`vision_language.py`)."""

    @property
    def chat_template(self) -> str | None:
        """How a conversation becomes a prompt, of a folder without a template; None: not at all."""

    def adapt(self, model: nn.Module, *, max_length: int) -> HuggingFaceDecoder:
        """Returns a model as a decoder whose prompts may have images."""

    def own(self, model: nn.Module) -> OwnDecoder:
        """Returns a model with its own attention."""

    def fields(
        self,
        model: nn.Module,
        tokenizer: Tokenizer,
        special_tokens: SpecialTokens,
        chat_template: str | None,
        *,
        max_length: int,
    ) -> tuple[dict[str, Any], tuple[str, ...]]:
        """Returns fields of `ExportSource` for images, and notes.

        Raises:
            SourceError: Images cannot be served.
        """


def read_decoder(folder: ModelFolder, sight: Sight | None = None) -> tuple[ExportSource, tuple[str, ...]]:
    """Reads a causal language model.

    Args:
        folder: The folder.
        sight: How images are read; None: they are not.

    Raises:
        SourceError: The folder is incomplete, or its model is none that can be served.
    """
    own = folder.own_tokenizer()
    tokenizer = plain_tokenizer(own)
    special_tokens, defaults, more_notes = _generation_settings(folder, tokenizer)
    chat_template, chat_notes = read_chat_template(folder, own, tokenizer, special_tokens)
    if chat_template is None and sight is not None and sight.chat_template is not None:
        chat_template = sight.chat_template
        chat_notes += ("chat template: there is none; one turn of a user is read as the folder's processor writes it",)
    auto_class = _auto_class(folder.config)
    try:
        text_class = transformers.MODEL_MAPPING.get(type(folder.config.get_text_config()), None)
    except ValueError:  # the library names a class that it does not have
        text_class = None
    keeps_states = _keeps_states(folder.config.get_text_config(), text_class)
    is_written = text_class is not None and writes_attention(text_class) and not keeps_states
    own_name = own_attention(text_class) if is_written else "eager"
    model = folder.load(auto_class, attention=own_name if is_written else ATTENTION)
    give_experts(model, str(folder.path), None if folder.plain is None else folder.plain.path)
    length, notes = folder.length(model)
    with running(f"{folder.path}: {type(model).__name__}"):
        module = _adapted(model, max_length=length) if sight is None else sight.adapt(model, max_length=length)
    _check_against_own_attention(folder, module)
    own_of: Callable[[nn.Module], OwnDecoder] = OwnDecoder
    seen: dict[str, Any] = {}
    if sight is None:
        notes += _leave_out_media(folder.config, model)
    else:
        own_of = sight.own
        seen, further = sight.fields(model, tokenizer, special_tokens, chat_template, max_length=length)
        notes += further
    return (
        folder.source(
            model,
            module,
            make_reference=lambda: own_of(folder.load(auto_class, attention=own_name)),
            tokenizer=tokenizer,
            special_tokens=special_tokens,
            prompt_prefix=_prompt_prefix(tokenizer),
            media_tokens=_media_tokens(folder.config, tokenizer),
            chat_template=chat_template,
            sampling_defaults=defaults,
            evaluation=folder.evaluation(),
            **seen,
        ),
        notes + more_notes + chat_notes,
    )


def _auto_class(config: Any) -> Any:
    """Returns the class of `transformers` that makes models with a language model of a configuration's kind."""
    return (
        AutoModelForCausalLM if type(config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING else AutoModelForMultimodalLM
    )


def text_model(model: nn.Module) -> Any:
    """Returns the part of a model that reads tokens, without the output projection."""
    of_text = cast("Any", model)
    is_text = of_text.config.get_text_config() is of_text.config
    return of_text.base_model if is_text else of_text.get_decoder().base_model


def _media_of(config: Any) -> str:
    """Returns what a model reads beside text, for people; nothing if that is all."""
    named = {"images": "vision_config", "sounds": "audio_config"}
    return " and ".join(media for media, name in named.items() if getattr(config, name, None) is not None)


def _leave_out_media(config: Any, model: nn.Module) -> tuple[str, ...]:
    """Takes the towers out that read images and sounds, and says so."""
    text = text_model(model)
    base = cast("Any", model).base_model
    media = _media_of(config)
    if text is not base:
        for name, part in list(base.named_children()):
            if not any(inner is text for inner in part.modules()):
                setattr(base, name, None)
        media = media or "what it reads beside text"
    return (f"{media}: not served; the bundle is the language model inside, for texts",) if media else ()


def _media_tokens(config: Any, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Returns the tokens that stand for images and sounds in a prompt."""
    if config.get_text_config() is config:
        return ()
    stated = [value for name, value in config.to_dict().items() if _MEDIA_TOKEN.search(name)]
    return tuple(sorted({one for one in stated if isinstance(one, int) and tokenizer.id_to_token(one) is not None}))


def _written_windows(config: Any) -> dict[int, int]:
    """Returns, by layer, how many keys a query sees, of a family whose layers write that out (GPT-Neo)."""
    kinds = getattr(config, "attention_layers", ())
    return {layer: int(config.window_size) for layer, kind in enumerate(kinds) if kind == "local"}


def check_decoder(path: Path, config: Any) -> None:
    """Checks what can be told of a causal language model by its configuration alone.

    Raises:
        SourceError: The model needs something that the exported graph does not compute.
    """
    config = config.get_text_config()
    if getattr(config, "is_decoder", True) is False and config.model_type in MODEL_FOR_MASKED_LM_MAPPING_NAMES:
        raise SourceError(
            f"{path}: is an encoder ({config.model_type}, whose is_decoder is false), which reads a text in both "
            "directions, and writes none; with --task text_embedding and --pooling it gives vectors"
        )
    model_class = transformers.MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if model_class is None or not has_experts(model_class):
        check_is_dense(path, config)
    if _keeps_states(config, model_class) and not (model_class and knows_states_of(model_class)):
        kinds = set(getattr(config, "layer_types", None) or ()) - _ATTENTION_LAYERS
        if kinds and kinds <= _OTHER_ATTENTION:
            raise SourceError(
                f"{path}: has layers of {', '.join(sorted(kinds))} ({config.model_type}), which the operator on the "
                "key/value cache does not compute, so this family is not supported"
            )
        raise SourceError(
            f"{path}: has layers that keep a recurrent state in a way of their own ({config.model_type}); no operator "
            "for it is known here, so this family is not supported"
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

    with running(f"{folder.path}: {kind}"):
        compute = partial(generation_logits, decoder, ids, noting)
        found = compute()
    layers = int(model.config.get_text_config().num_hidden_layers)
    if isinstance(decoder, HuggingFaceDecoder) and (not attending or len(attending) % layers):
        raise SourceError(
            f"{folder.path}: {kind}: {len(attending)} of {layers} layers attend through the interface that "
            "transformers has for it; a key/value cache needs all of them, so this family is not supported"
        )
    is_written = isinstance(decoder, HuggingFaceDecoder) and writes_attention(type(text_model(model)))
    if not is_written:
        model.set_attn_implementation("eager")
    try:
        with quiet(), torch.inference_mode():
            expected = model(input_ids=torch.from_numpy(ids)[None], use_cache=False).logits[0].float().numpy()
    except Exception as error:  # whatever its code raises
        raise SourceError(
            f"{folder.path}: {kind} does not read a text by itself ({first_line(error)}); this family is not supported"
        ) from error
    finally:
        if not is_written:
            model.set_attn_implementation(ATTENTION)
    check_logits(found, expected, f"{folder.path}: {kind}", compute)


def _window_of(config: Any) -> int | None:
    """Returns the sliding window of a decoder's attention, in tokens; None: it has none."""
    config = config.get_text_config()
    if written := _written_windows(config):
        return max(written.values())
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
    stated = as_ids(settings.eos_token_id) or as_ids(getattr(text, "eos_token_id", None))
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
