"""Causal language models, whose attention follows ours.

`transformers` sends the attention of its families through one interface. A function that is registered there calls the
`attend` that `HuggingFaceDecoder` is given, so that any decoder of that library follows docs/bring-your-own.md; rotary
positions, norms and grouped heads stay with the library's own code.

A decoder is held against `transformers`' own attention before it is exported, so a family that computes anything beside
what `attend` takes is refused with the difference.

B rows, T tokens, H heads, G key and value heads, K head width, D model width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from itertools import takewhile
from typing import Any, Final, Unpack, cast

import numpy as np
import torch
import transformers
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GenerationConfig

from headway_export.errors import SourceError
from headway_export.huggingface.folder import ModelFolder, first_line, quiet
from headway_export.reference import CAUSAL, generation_logits
from headway_export.source import ExportSource, find_chat_template, limits_of
from headway_server.bundles import SamplingDefaults, SpecialTokens
from headway_training.models.parts.attention import Attend, Scoring

ORACLE_BOUND: Final = 1e-4
"""Largest relative difference of logits between `attend` and the library's own attention."""

_ATTENTION: Final = "headway"
_IGNORED_GENERATION: Final = (
    "no_repeat_ngram_size",
    "encoder_repetition_penalty",
    "bad_words_ids",
    "suppress_tokens",
    "begin_suppress_tokens",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "exponential_decay_length_penalty",
    "sequence_bias",
    "typical_p",
    "epsilon_cutoff",
    "eta_cutoff",
)
"""Entries of `generation_config.json` that change what is generated and that a bundle has no place for."""
_NEUTRAL: Final[tuple[Any, ...]] = (None, 0, 0.0, 1.0, [], {})


_attend: ContextVar[Attend] = ContextVar("attend")


def _injected_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,  # noqa: ARG001 (the attention that is injected is causal and has its own)
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,  # noqa: ARG001 (`ModelFolder.length` has compared it with the length)
    **further: Any,
) -> tuple[Tensor, None]:
    """Attention of a layer of `transformers`: (B, H, T, K), twice (B, G, T, K) -> (B, T, H, K).

    Raises:
        SourceError: The layer asks for something that `attend` does not take.
    """
    for name in ("softcap", "s_aux", "position_bias", "alibi"):
        if further.get(name) is not None:
            raise SourceError(f"its attention has {name}, which the key/value cache's operator is not given")
    number = getattr(module, "layer_idx", None)
    if not isinstance(number, int):
        raise SourceError(f"{type(module).__name__} does not know its number (layer_idx)")
    query, key, value = (tensor.transpose(1, 2) for tensor in (query, key, value))
    return _attend.get()(query, key, value, layer=number, scale=scaling), None


transformers.AttentionInterface.register(_ATTENTION, _injected_attention)


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
        token = _attend.set(attend)
        try:
            output = cast("Any", self.model).base_model(
                input_ids=input_ids, position_ids=position_ids, use_cache=False, return_dict=True
            )
        finally:
            _attend.reset(token)
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


def read_decoder(folder: ModelFolder) -> tuple[ExportSource, tuple[str, ...]]:
    """Reads a causal language model.

    Raises:
        SourceError: The folder is incomplete, or its model is none that can be served.
    """
    _check_config(folder)
    tokenizer, _ = folder.tokenizer()
    model = folder.load(AutoModelForCausalLM, attention=_ATTENTION)
    length, notes = folder.length(model, _window_of(folder.config))
    module = HuggingFaceDecoder(model, max_length=length)
    _check_against_own_attention(folder, module)
    special_tokens, defaults, more_notes = _generation_settings(folder, tokenizer)
    return (
        ExportSource(
            name=folder.name(),
            task=folder.task,
            module=module,
            description=f"{type(model).__name__}, exported from a folder of transformers.",
            license=folder.license(),
            architecture=folder.architecture(model),
            limits=limits_of(module, folder.task),
            tokenizer=tokenizer,
            special_tokens=special_tokens,
            prompt_prefix=_prompt_prefix(tokenizer),
            chat_template=find_chat_template(folder.path),
            sampling_defaults=defaults,
            evaluation=folder.evaluation(),
        ),
        notes + more_notes,
    )


def _check_config(folder: ModelFolder) -> None:
    """Checks what can be told from the configuration alone.

    Raises:
        SourceError: The model needs something that the exported graph does not compute.
    """
    config = folder.config
    for name in ("num_experts", "num_local_experts", "n_routed_experts"):
        if (getattr(config, name, None) or 0) > 1:
            raise SourceError(f"{folder.path}: is a mixture of experts ({config.model_type}), which is not supported")
    rope = getattr(config, "rope_parameters", None) or {}
    settings: Sequence[Any] = [rope, *(part for part in rope.values() if isinstance(part, Mapping))]
    kinds = {part.get("rope_type", part.get("type")) for part in settings}
    if changing := kinds & {"dynamic", "longrope"}:
        raise SourceError(
            f"{folder.path}: its rotary positions are scaled by the running length ({changing.pop()}), so a cached key "
            "would have to change as the text grows; this is not supported"
        )


def _check_against_own_attention(folder: ModelFolder, decoder: HuggingFaceDecoder) -> None:
    """Compares the logits of an adapted decoder with those of `transformers` itself, on random tokens.

    Raises:
        SourceError: They differ: the family computes something that does not go through `attend`.
    """
    model = cast("Any", decoder.model)
    kind = type(model).__name__
    length = min(48, decoder.max_length)
    ids = np.random.default_rng(0).integers(0, model.config.get_text_config().vocab_size, length)
    attending: set[int] = set()

    def noting(query: Tensor, key: Tensor, value: Tensor, *, layer: int, **scoring: Unpack[Scoring]) -> Tensor:
        attending.add(layer)
        return CAUSAL(query, key, value, layer=layer, **scoring)

    try:
        with quiet():
            found = generation_logits(decoder, ids, noting)
    except SourceError as error:
        raise SourceError(f"{folder.path}: {kind}: {error}") from error
    except Exception as error:  # whatever its code raises
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
        model.set_attn_implementation(_ATTENTION)
    error_size = float(np.abs(found - expected).max() / max(np.abs(expected).max(), 1e-6))
    if not error_size <= ORACLE_BOUND:
        raise SourceError(
            f"{folder.path}: {kind} computes something that injected attention leaves out: its logits differ by "
            f"{error_size:.1e} from those of transformers (bound {ORACLE_BOUND:.0e}); this family is not supported"
        )


def _window_of(config: Any) -> int | None:
    """Returns the sliding window of a decoder's attention, in tokens; None: it has none."""
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
    if (folder.path / "generation_config.json").exists():
        settings = GenerationConfig.from_pretrained(folder.path, local_files_only=True)
    else:
        settings = GenerationConfig.from_model_config(folder.config)
    ends = _as_ids(settings.eos_token_id) or _as_ids(text.eos_token_id)
    names = folder.token_names()
    turn_end = tokenizer.token_to_id(names["eos_token"]) if "eos_token" in names else None
    if turn_end in ends:  # the template knows this one as eos_token
        ends = [turn_end, *(end for end in ends if end != turn_end)]
    begin = tokenizer.token_to_id(names["bos_token"]) if "bos_token" in names else None
    special = SpecialTokens(
        pad=settings.pad_token_id,
        bos=begin if begin is not None else settings.bos_token_id,
        eos=ends[0] if ends else None,
        more_eos=tuple(ends[1:]),
    )
    values: dict[str, Any] = {"max_new_tokens": settings.max_new_tokens}
    if settings.repetition_penalty is not None:
        values["repetition_penalty"] = settings.repetition_penalty
    if settings.do_sample:
        values["temperature"] = 1.0 if settings.temperature is None else settings.temperature
        values["top_k"] = 50 if settings.top_k is None else settings.top_k  # what `generate` takes without one
        values |= {name: getattr(settings, name) for name in ("top_p", "min_p") if getattr(settings, name) is not None}
    ignored = [name for name in _IGNORED_GENERATION if getattr(settings, name, None) not in _NEUTRAL]
    notes = (f"generation_config: {', '.join(ignored)}: not applied by the server",) if ignored else ()
    return special, SamplingDefaults.model_validate(values), notes


def _as_ids(value: int | Sequence[int] | None) -> list[int]:
    if value is None:
        return []
    return [value] if isinstance(value, int) else list(dict.fromkeys(value))
