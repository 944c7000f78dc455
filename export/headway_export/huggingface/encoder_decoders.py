"""Encoder-decoders, whose decoder's attention follows ours.

The layers of the decoder call the `attend` and `attend_cross` that `HuggingFaceEncoderDecoder` is given
(`attention.py`). What a layer computes of the source, its keys and values, is computed once a source in
`cross_keys_values`; what the layer itself computes of the empty source that it is shown instead is never read. The
encoder may read anything. Relative positions (T5) are a bias on the scores, given for all positions that there may be.

A model is held against `transformers`' own attention before it is exported.

B rows, T target tokens, S source tokens, L most target tokens, H heads, K head width, D model width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeVar, Unpack, cast

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn import functional
from transformers import MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING, AutoModelForSeq2SeqLM
from transformers.modeling_outputs import BaseModelOutput

from headway_export.errors import SourceError
from headway_export.huggingface.attention import (
    ATTENTION,
    asked_logits,
    attend_in_one_width,
    attending,
    check_logits,
    layer_of,
    running,
    without,
)
from headway_export.huggingface.folder import (
    ModelFolder,
    as_ids,
)
from headway_export.huggingface.graph_forms import with_given_attention, with_summary_token, with_weights
from headway_export.huggingface.settings import generation_notes
from headway_export.reference import OwnTarget, translation_logits
from headway_export.source import ExportSource
from headway_export.tracing import alignment_layer
from headway_server.bundles import Languages, SpecialTokens
from headway_training.folders import MAX_LENGTH
from headway_training.models.parts.attention import Attend, AttendCross, TextScoring, full_attention, padding_attention
from headway_training.positions import is_position_name

_MARK: Final = "attends_to_source"
_UNTRIED: Final = ("softcap", "sinks", "window")
"""Parameters of attention that no encoder-decoder was tried with."""
_KEY_AND_VALUE: Final = (("k_proj", "v_proj"), ("k", "v"), ("key", "value"))
_HEAD_DIM: Final = ("head_dim", "key_value_proj_dim", "attention_head_size")
_CROSS_LAYERS: Final = (".encoder_attn", ".EncDecAttention", ".crossattention.self", ".crossattention")
"""What the names of layers that attend to a source end with; the innermost of a layer attends."""
Adapted = TypeVar("Adapted", bound="HuggingFaceEncoderDecoder")
_positions: ContextVar[Tensor] = ContextVar("positions")


class HuggingFaceEncoderDecoder(nn.Module):
    """An encoder-decoder of `transformers` as an `EncoderDecoder`."""

    def __init__(
        self, model: nn.Module, *, max_source_length: int, max_target_length: int, decoder: nn.Module | None = None
    ) -> None:
        """Adapts a model that was made with `ATTENTION`, and gives its decoder positions of its own.

        Args:
            model: The model.
            max_source_length: Most tokens of a source.
            max_target_length: Most tokens of a target.
            decoder: Its decoder without the output projection; None: the model says which.

        Raises:
            SourceError: The decoder has no attention to the source, or positions that are not known here.
        """
        super().__init__()
        self.model = model
        self.max_source_length = max_source_length
        self.max_target_length = max_target_length
        self._decoder = cast("Any", model).get_decoder() if decoder is None else decoder
        self._cross = _cross_layers(self._decoder)
        for name, part in list(self._decoder.named_children()):
            if is_position_name(name):
                setattr(self._decoder, name, _GivenPositions(part))
        self._distances = nn.ParameterDict(_distance_tables(self._decoder, max_target_length))
        self._scale = float(cast("Any", self._decoder).config.d_model) ** -0.5 if _scales_output(model) else 1.0

    def encode(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """(B, S), (B, S) -> (B, S, D)."""
        return self._encode(attention_mask, input_ids=input_ids, attention_mask=attention_mask)

    def _encode(self, mask: Tensor | None, **inputs: Tensor) -> Tensor:
        """Encodes the inputs of the library's encoder, which attends where the mask (B, S) is 1: -> (B, S, D).

        Without a mask it attends to all positions.
        """
        attend = full_attention() if mask is None else padding_attention(mask)

        def attend_layer(
            module: nn.Module, query: Tensor, key: Tensor, value: Tensor, **scoring: Unpack[TextScoring]
        ) -> Tensor:
            without(scoring, *_UNTRIED)
            return attend(query, key, value, layer=getattr(module, "layer_idx", None) or 0, **scoring)

        with attending(attend_layer):
            output = cast("Any", self.model).get_encoder()(**inputs, return_dict=True)
        return cast("Tensor", output.last_hidden_state)

    def cross_keys_values(self, memory: Tensor) -> list[tuple[Tensor, Tensor]]:
        """(B, S, D) -> for each layer of the decoder twice (B, S, H, K)."""
        return [layer.keys_values(memory) for layer in self._cross]

    def decode(self, input_ids: Tensor, position_ids: Tensor, attend: Attend, attend_cross: AttendCross) -> Tensor:
        """(B, T), (B, T) -> (B, T, D)."""
        biases = {layer: _bias_of(table, position_ids) for layer, table in self._distances.items()}

        def attend_layer(
            module: nn.Module, query: Tensor, key: Tensor, value: Tensor, **scoring: Unpack[TextScoring]
        ) -> Tensor:
            without(scoring, *_UNTRIED)
            layer = layer_of(module)
            if getattr(module, _MARK, False):  # a bias is for the empty source, and zeros
                return attend_cross(query, layer=layer, scale=scoring.get("scale"))
            if scoring.get("bias") is not None:  # for positions 0, 1, 2; layers without a table have the first one's
                if not biases:
                    raise SourceError("its attention has position_bias of a kind that is not known")
                scoring["bias"] = biases.get(str(layer), biases["0"])
            return attend_in_one_width(attend, query, key, value, layer=layer, **scoring)

        width = self._cross[0].width
        nothing = torch.zeros(input_ids.shape[0], 1, width, dtype=next(self.model.parameters()).dtype)
        token = _positions.set(position_ids)
        try:
            with attending(attend_layer):
                output = self._decoder(
                    input_ids=input_ids,
                    encoder_hidden_states=nothing,
                    use_cache=False,
                    return_dict=True,
                    **self._decoder_inputs(position_ids),
                )
        finally:
            _positions.reset(token)
        return cast("Tensor", output.last_hidden_state)

    def _decoder_inputs(self, position_ids: Tensor) -> dict[str, Any]:  # noqa: ARG002 (others read it)
        """Returns what the decoder is given beside tokens and source."""
        return {}

    def logits(self, hidden_states: Tensor) -> Tensor:
        """(..., D) -> (..., V)."""
        if self._scale != 1.0:
            hidden_states = hidden_states * self._scale
        logits: Tensor = cast("Any", self.model).get_output_embeddings()(hidden_states)
        bias = getattr(self.model, "final_logits_bias", None)
        return logits if bias is None else logits + bias[0]


class OwnEncoderDecoder(OwnTarget):
    """An encoder-decoder of `transformers` with its own attention."""

    def __init__(self, model: nn.Module, *, source: str = "input_ids", decoder: nn.Module | None = None) -> None:
        """Takes the model, what it calls the source that it reads, and its decoder; None: the model says which."""
        super().__init__()
        self.model = model
        self._source = source
        self._layers = cross_attentions(cast("Any", model).get_decoder() if decoder is None else decoder)
        for layer in self._layers:
            with_weights(layer)

    def encode_source(self, source: Any) -> Tensor:
        """(1, S) or what else the encoder reads -> (1, S, D)."""
        encoder = cast("Any", self.model).get_encoder()
        return cast("Tensor", encoder(**self._read(source), return_dict=True).last_hidden_state)

    def _read(self, source: Any) -> dict[str, Tensor]:
        mask = {} if source.is_floating_point() else {"attention_mask": torch.ones_like(source)}
        return {self._source: source, **mask}

    def target_logits(
        self, source: Any, target_ids: Tensor, positions: Tensor, memory: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """(1, S) or what else the encoder reads, (1, T), (P,) -> (1, P, V), (1, H, T, S)."""
        weights: list[Tensor] = []
        layer = self._layers[alignment_layer(len(self._layers))]
        hook = layer.register_forward_hook(lambda _module, _inputs, outputs: weights.append(_weights_of(outputs)))
        read: dict[str, Any] = self._read(source)
        if memory is not None:
            read[self._source], read["encoder_outputs"] = None, _Memory(last_hidden_state=memory)
        try:
            with asked_logits(self.model, positions):
                output = self.model(**read, decoder_input_ids=target_ids, use_cache=False, return_dict=True)
        finally:
            hook.remove()
        return output.logits, weights[0]


@dataclass
class _Memory(BaseModelOutput):  # type: ignore[misc]  # the library has no types
    """What an encoder has made of one source."""

    attention_mask: Tensor | None = None
    """Of its positions, which Moonshine asks for; None: it attends to all."""


def _weights_of(outputs: Sequence[Tensor | None]) -> Tensor:
    """Returns the weights among what a layer's attention returns: they are the last of four axes."""
    return next(part for part in reversed(outputs) if isinstance(part, Tensor) and part.ndim == 4)


class _GivenPositions(nn.Module):
    """Embedding of the positions that `HuggingFaceEncoderDecoder.decode` is given, instead of 0, 1, 2."""

    def __init__(self, embedding: nn.Module) -> None:
        super().__init__()
        table = getattr(embedding, "weight", getattr(embedding, "weights", None))
        if not isinstance(table, Tensor):
            raise SourceError(f"{type(embedding).__name__}: how it makes its positions is not known")
        self.table = nn.Parameter(table.detach(), requires_grad=False)
        first = getattr(embedding, "padding_idx", None) if hasattr(embedding, "weights") else None
        self.offset = int(getattr(embedding, "offset", 0)) if first is None else int(first) + 1

    def forward(self, *_inputs: Any, **_named: Any) -> Tensor:
        return self.table[_positions.get() + self.offset]  # (B, T, D)


def _distance_tables(decoder: nn.Module, max_length: int) -> dict[str, nn.Parameter]:
    """Returns, by the layers that have one, what is added to the score of a key so many tokens back: (L, H)."""
    tables: dict[str, nn.Parameter] = {}
    for part in decoder.modules():
        if isinstance(getattr(part, "relative_attention_bias", None), nn.Embedding):
            with torch.inference_mode():
                # Of the last of L queries, (1, H, 1, L), the nearest key last.
                last = cast("Any", part).compute_bias(1, max_length, past_seen_tokens=max_length - 1)
            tables[str(layer_of(part))] = nn.Parameter(last[0, :, 0].flip(1).T.clone(), requires_grad=False)
    return tables


def _bias_of(table: Tensor, position_ids: Tensor) -> Tensor:
    """(L, H), (B, T) -> (B, H, T, L); keys behind a query, which it does not see, have any."""
    distances = position_ids[..., None] - torch.arange(len(table), device=position_ids.device)  # (B, T, L)
    return table[distances.clamp(min=0)].permute(0, 3, 1, 2)


class _CrossLayer:
    """The projections of a layer's attention to the source."""

    def __init__(self, module: nn.Module) -> None:
        self._both = getattr(module, "c_attn", None)  # keys and values by one product, whose weight is transposed
        if isinstance(self._both, nn.Module):
            self.width = int(cast("Tensor", self._both.weight).shape[0])
        else:
            names = next(names for names in _KEY_AND_VALUE if hasattr(module, names[0]))
            self._key, self._value = (cast("nn.Linear", getattr(module, name)) for name in names)
            self.width = self._key.in_features
        self._head_dim = next(int(size) for name in _HEAD_DIM if (size := getattr(module, name, 0)))
        self._padding = int(getattr(module, "head_dim_padding", 0))  # which a layer adds to queries, keys and values

    def keys_values(self, memory: Tensor) -> tuple[Tensor, Tensor]:
        """(B, S, D) -> twice (B, S, H, K)."""
        key, value = (
            (self._key(memory), self._value(memory)) if self._both is None else self._both(memory).chunk(2, dim=-1)
        )
        return self._split(key), self._split(value)

    def _split(self, states: Tensor) -> Tensor:
        """(B, S, H * K) -> (B, S, H, K)."""
        states = states.reshape(*states.shape[:-1], -1, self._head_dim)
        return functional.pad(states, (0, self._padding)) if self._padding else states


def cross_attentions(decoder: nn.Module) -> list[nn.Module]:
    """Returns the modules of a decoder that attend to the source, in the order of the layers.

    Raises:
        SourceError: There are none that are known.
    """
    found = [
        part
        for name, part in decoder.named_modules()
        if name.endswith(_CROSS_LAYERS) and not hasattr(part, "self")  # what is around the layer of BERT's kind
    ]
    if not found:
        raise SourceError(f"{type(decoder).__name__}: where it attends to its source is not known")
    return sorted(found, key=layer_of)


def _cross_layers(decoder: nn.Module) -> list[_CrossLayer]:
    """Returns a decoder's attention to the source, and marks its modules.

    A mark, since the tracer hands modules out as other objects with the same attributes.
    """
    found = cross_attentions(decoder)
    for part in found:
        setattr(part, _MARK, True)
    return [_CrossLayer(part) for part in found]


def _scales_output(model: nn.Module) -> bool:
    """True if a model scales the states that logits are computed of, as T5 does where it ties its embeddings."""
    config = cast("Any", model).config
    return bool(getattr(config, "scale_decoder_outputs", config.model_type == "umt5"))


def adapt(
    folder: ModelFolder, model: nn.Module, *, max_source_length: int, max_target_length: int
) -> HuggingFaceEncoderDecoder:
    """Adapts a model, and compares its logits with those that `transformers` computes itself, on random tokens.

    Args:
        folder: The model's.
        model: With the library's own attention; it is changed.
        max_source_length: Most tokens of a source.
        max_target_length: Most tokens of a target.

    Raises:
        SourceError: The logits differ: the family computes something that is not adapted.
    """
    source = random_tokens(folder, min(40, max_source_length))
    adapter = partial(
        HuggingFaceEncoderDecoder, max_source_length=max_source_length, max_target_length=max_target_length
    )
    target = random_tokens(folder, min(48, max_target_length))
    return adapt_to(folder, model, adapter, {"input_ids": source}, target)


def adapt_to(
    folder: ModelFolder,
    model: nn.Module,
    adapter: Callable[[nn.Module], Adapted],
    source: Mapping[str, NDArray[Any]],
    target: NDArray[np.int64],
) -> Adapted:
    """Adapts a model, and compares its logits with those that `transformers` computes itself.

    Args:
        folder: The model's.
        model: With the library's own attention; it is changed.
        adapter: Makes the adapted module of the model, which has `ATTENTION` by then.
        source: What the encoder reads, by the library's name for it, without the batch.
        target: What the decoder reads, (T,).

    Raises:
        SourceError: The logits differ: the family computes something that is not adapted.
    """
    kind = type(model).__name__
    ((name, values),) = source.items()
    with torch.inference_mode():
        output = model(
            **{name: torch.from_numpy(values)[None]}, decoder_input_ids=torch.from_numpy(target)[None], use_cache=False
        )
    expected = output.logits[0].float().numpy()
    with running(f"{folder.path}: {kind}"):
        cast("Any", model).set_attn_implementation(ATTENTION)
        with_given_attention(model, ATTENTION)
        module = adapter(model)
        compute = partial(translation_logits, module, values, target)
        found = compute()
    check_logits(found, expected, f"{folder.path}: {kind}", compute)
    return module


def random_tokens(folder: ModelFolder, length: int) -> NDArray[np.int64]:
    """Returns (T,) tokens, none of which pads."""
    texts = folder.config.get_text_config()
    vocabulary, padding = int(texts.vocab_size), getattr(folder.config, "pad_token_id", texts.pad_token_id)
    ids = np.random.default_rng(0).integers(0, vocabulary, length)
    return np.where(ids == padding, (ids + 1) % vocabulary, ids)


def read_rewriter(folder: ModelFolder) -> tuple[ExportSource, tuple[str, ...]]:
    """Reads a model that makes texts of texts.

    Raises:
        SourceError: The folder is incomplete, or its model is none that can be served.
    """
    if type(folder.config) not in MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING:
        raise SourceError(
            f"{folder.path}: {folder.config.model_type} does not make texts of texts alone, and is not supported"
        )
    tokenizer = folder.tokenizer()
    return read_encoder_decoder(folder, tokenizer, read_generation_config(folder))


def read_encoder_decoder(
    folder: ModelFolder, tokenizer: Tokenizer, start: DecoderStart, languages: Languages | None = None
) -> tuple[ExportSource, tuple[str, ...]]:
    """Reads an encoder-decoder whose tokenizer has been read.

    Args:
        folder: The model's.
        tokenizer: Of sources and targets.
        start: What `read_generation_config` has found.
        languages: Of a translation model.

    Raises:
        SourceError: Its weights cannot be read, or it computes something that is not adapted.
    """

    def load() -> nn.Module:
        return with_summary_token(folder.load(AutoModelForSeq2SeqLM))

    model = load()
    max_source_length, max_target_length, notes = _lengths(folder, model)
    module = adapt(folder, model, max_source_length=max_source_length, max_target_length=max_target_length)
    source = folder.source(
        model,
        module,
        make_reference=lambda: OwnEncoderDecoder(load()),
        tokenizer=tokenizer,
        special_tokens=start.special_tokens,
        prompt_prefix=() if languages is not None and languages.target_tokens else start.prefix,
        suppressed_tokens=start.suppressed_tokens,
        languages=languages,
        evaluation=folder.evaluation(),
    )
    if source.evaluation is not None:
        source.encode_sources(source.evaluation.texts, source.evaluation.languages)  # has all languages, or refuses
    return source, start.notes + notes


def _lengths(folder: ModelFolder, model: nn.Module) -> tuple[int, int, tuple[str, ...]]:
    """Returns the most tokens of a source and of a target, and notes.

    Raises:
        SourceError: More are asked for than the model takes.
    """
    longest = getattr(folder.config, "max_encoder_position_embeddings", None)  # LED's: sources are longer than targets
    if longest is None:
        length, notes = folder.length(model)
        return length, length, notes
    asked = folder.options.max_length
    if asked is not None and asked > longest:
        raise SourceError(f"{folder.path}: --max-length {asked}: the model takes {longest} tokens")
    chosen = asked or min(longest, MAX_LENGTH)
    notes = ("the first token of a source attends to all, as LED's documentation advises",)
    if chosen < longest:
        notes += (
            f"sources of at most {chosen} tokens: the model takes {longest} tokens; --max-length N changes it, and "
            "memory grows by its square",
        )
    return chosen, min(chosen, int(folder.config.max_decoder_position_embeddings)), notes


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderStart:
    """What `generation_config.json` says."""

    special_tokens: SpecialTokens
    """`bos` is what the decoder starts from."""
    prefix: tuple[int, ...]
    """Tokens that follow it, whatever the source."""
    suppressed_tokens: tuple[int, ...]
    """That are never generated."""
    notes: tuple[str, ...]
    """For the user."""


def read_generation_config(
    folder: ModelFolder, *, applied: Collection[str] = (), start: int | None = None
) -> DecoderStart:
    """Reads `generation_config.json`, or what the configuration says in its place.

    Args:
        folder: The folder.
        applied: What the caller reads.
        start: What the decoder starts from; None: what is said there.

    Raises:
        SourceError: It is not said what the decoder starts from.
    """
    settings = folder.generation_config()
    start = settings.decoder_start_token_id if start is None else start
    start = getattr(folder.config, "decoder_start_token_id", None) if start is None else start
    if start is None:
        raise SourceError(f"{folder.path}: does not say what its decoder starts from (decoder_start_token_id)")
    ends = as_ids(settings.eos_token_id) or as_ids(getattr(folder.config, "eos_token_id", None))
    bad_words = [list(word) for word in settings.bad_words_ids or ()]
    suppressed = {word[0] for word in bad_words if len(word) == 1} | set(settings.suppress_tokens or ())
    known = {"suppress_tokens", "forced_bos_token_id", *applied}
    if all(len(word) == 1 for word in bad_words):
        known.add("bad_words_ids")
    special = SpecialTokens(
        pad=settings.pad_token_id, bos=int(start), eos=ends[0] if ends else None, more_eos=tuple(ends[1:])
    )
    return DecoderStart(
        special_tokens=special,
        prefix=tuple(as_ids(settings.forced_bos_token_id)),
        suppressed_tokens=tuple(sorted(suppressed)),
        notes=generation_notes(settings, applied=known, asked=_ASKED_FOR),
    )


_ASKED_FOR: Final = {
    "min_length": "min_new_tokens",
    "min_new_tokens": "min_new_tokens",
    "num_beams": "beam_size",
    "length_penalty": "length_penalty",
    "no_repeat_ngram_size": "no_repeat_ngram_size",
    "max_length": "max_new_tokens",
    "max_new_tokens": "max_new_tokens",
}
"""Settings of a search and what calls call them; a bundle has no defaults for them."""
