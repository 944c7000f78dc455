"""What a model computes in PyTorch: every input whole and alone, without a cache or padding.

Exported graphs are held against a second model (`Reference`), which is made anew and was never traced: a module that
changes itself as it is run, or that holds something which its weights do not say, answers otherwise than its graph.
The scales of an int8 cache are taken from the module that was traced.

T tokens, P asked positions, S source tokens, H heads, G key/value heads, K head width, V vocabulary.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, Unpack, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from headway_export.candidate import media_of
from headway_export.differences import relative_errors
from headway_export.errors import ParityError, SourceError
from headway_export.graphs import outputs_of
from headway_export.inputs import Inputs
from headway_export.rewriting import LayerRange
from headway_export.rounding import is_rounding
from headway_export.source import ExportSource, Readable
from headway_export.spool import spooled
from headway_export.tasks.table import task_of
from headway_export.tracing import alignment_layer
from headway_server.batching import Tensors
from headway_training.models.parts.attention import (
    Attend,
    Scoring,
    TextScoring,
    attention_weights,
    causal_attention,
    cross_attention,
    fused_attention,
)
from headway_training.models.protocols import (
    Decoder,
    EncoderDecoder,
    HybridDecoder,
    ImageToText,
    PromptSegmenter,
    RecurrentEncoderDecoder,
    SeeingDecoder,
    StatefulDecoder,
    decoder_kind,
    is_recurrent,
)
from headway_training.models.recurrent import recur_packed

CAUSAL: Attend = causal_attention(fused_attention)
_PIECE = 50
_STEADY_BOUND = 1e-5
"""Largest relative difference between two answers of the same model to the same input."""
_MOST_KEPT_BYTES = 1 << 29
"""Of answers that are kept on disk for the variants to come."""
_MOST_MEMORIES = 8
"""Encoded sources that are kept for further targets: those of a batch."""

Kept = TypeVar("Kept")


class TargetAnswers(NamedTuple):
    """What an encoder-decoder answers to one source."""

    logits: NDArray[np.float32]
    """(P, V), after the asked positions of a target."""
    alignment: NDArray[np.float32]
    """(T, S): the attention to the source that stands for alignments, averaged over heads."""


class OwnText(nn.Module, ABC):
    """A decoder that attends by itself, as a library made it, in place of one whose attention is injected."""

    @abstractmethod
    def text_logits(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        """Logits after the asked tokens of a text: (1, T), (P,) -> (1, P, V)."""

    @abstractmethod
    def text_attention(self, input_ids: Tensor) -> tuple[Tensor, ...]:
        """Attention weights of every layer: (1, T) -> (1, H, T, T) each."""


class OwnSight(OwnText):
    """A decoder whose prompts may have images, that attends by itself."""

    @abstractmethod
    def embed_images(self, pixel_values: Tensor) -> Tensor:
        """(B, 3, height, width) -> (B, M, D)."""

    @abstractmethod
    def image_logits(self, images: Tensor, input_ids: Tensor, positions: Tensor, num_given: int) -> Tensor:
        """Logits after the asked tokens of a text: tiles (N, 3, height, width), (1, T), (P,) -> (1, P, V).

        Its first `num_given` tokens are the prompt.
        """


class OwnTarget(nn.Module, ABC):
    """An encoder-decoder that attends by itself, as a library made it."""

    @abstractmethod
    def encode_source(self, source: Any) -> Tensor:
        """Returns what the encoder makes of a source, (1, S, D).

        It is tokens (1, S) int64, pixels or features, or several of them by name.
        """

    @abstractmethod
    def target_logits(
        self, source: Any, target_ids: Tensor, positions: Tensor, memory: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Logits after the asked tokens of a target, and its alignment.

        Args:
            source: As `encode_source` reads it.
            target_ids: (1, T) int64.
            positions: (P,) int64.
            memory: What `encode_source` has returned; None: the library's model encodes the source itself.

        Returns:
            (1, P, V), and the weights of the layer that aligns, (1, H, T, S).
        """


class Reference:
    """A second model of a source, made anew, against which variants are held.

    Answers are kept, as far as they fit, where several variants are asked the same. A source is encoded once for its
    targets, except where an answer is asked for again, with other rounding errors or by `check_is_steady`.
    """

    def __init__(self, source: ExportSource, *, folder: Path | None = None, keeps_answers: bool = True) -> None:
        """Makes the model.

        Args:
            source: What it is of.
            folder: Where temporary files are made of what is kept; None: encoded sources are kept in memory, and
                answers are not.
            keeps_answers: True to keep answers for variants to come.

        Raises:
            SourceError: It cannot be made a second time, or parts of it are those of the first.
        """
        self.source = source
        self.module = source.make_reference().eval()
        if {id(part) for part in self.module.modules()} & {id(part) for part in source.module.modules()}:
            raise SourceError(
                f"{source.name}: its {type(self.module).__name__} was asked for twice and came as one object, which "
                "cannot be held against itself; make a new module at each call"
            )
        self._answers: dict[str, Any] = {}
        self._kept_bytes, self._folder, self._keeps_answers = 0, folder, keeps_answers and folder is not None
        self._memories: dict[str, NDArray[Any]] = {}
        self._first: dict[str, tuple[Callable[[], Any], Any]] = {}

    def __repr__(self) -> str:
        return f"Reference({type(self.module).__name__}, {len(self._answers)} answers, {self._kept_bytes} bytes)"

    def text_logits(self, token_ids: NDArray[np.int64], positions: NDArray[np.int64]) -> NDArray[np.float32]:
        """Logits after the asked tokens of a text: (T,), (P,) int64 -> (P, V) float32."""

        def answer() -> NDArray[np.float32]:
            if not isinstance(self.module, OwnText):
                return generation_logits(self.module, token_ids, positions=positions)
            with torch.inference_mode():
                ids, asked = torch.from_numpy(token_ids), torch.from_numpy(positions)
                return self.module.text_logits(ids.unsqueeze(0), asked)[0].float().numpy()

        return self._ask("text", answer, token_ids, positions)

    def image_logits(
        self, images: NDArray[np.float32], token_ids: NDArray[np.int64], positions: NDArray[np.int64], num_given: int
    ) -> NDArray[np.float32]:
        """Logits after the asked tokens of a text with images: tiles (N, 3, height, width), (T,), (P,) -> (P, V).

        Its first `num_given` tokens are the prompt.
        """

        def answer() -> NDArray[np.float32]:
            with torch.inference_mode():
                tiles, ids, asked = (torch.from_numpy(array) for array in (images, token_ids, positions))
                own = cast("OwnSight", self.module)
                return own.image_logits(tiles, ids.unsqueeze(0), asked, num_given)[0].float().numpy()

        return self._ask("images", answer, images, token_ids, positions, np.array(num_given))

    def tile_embeddings(self, pixel_values: NDArray[np.float32]) -> NDArray[np.float32]:
        """Embeddings of a tile, (3, height, width) -> (M, D)."""

        def answer() -> NDArray[np.float32]:
            with torch.inference_mode():
                tile = torch.from_numpy(pixel_values).unsqueeze(0)
                return cast("SeeingDecoder", self.module).embed_images(tile)[0].float().numpy()

        return self._ask("tile", answer, pixel_values)

    def target_answers(
        self, source_of: Readable, target_ids: NDArray[np.int64], positions: NDArray[np.int64]
    ) -> TargetAnswers:
        """Logits after the asked tokens of a target, and its alignment: (S,), (T,), (P,) -> (P, V), (T, S).

        The source of a caption is an image, (3, height, width) float32; that of a transcript (mel bins, frames).
        """

        def answer(memory: Tensor | None = None) -> TargetAnswers:
            if not isinstance(self.module, OwnTarget):
                return _target_answers(self.module, source_of, target_ids, CAUSAL, positions, memory)
            source, target = _as_batch(source_of), torch.from_numpy(target_ids).unsqueeze(0)
            with torch.inference_mode():
                logits, weights = self.module.target_logits(source, target, torch.from_numpy(positions), memory)
                return TargetAnswers(logits[0].float().numpy(), weights[0].float().mean(dim=0).numpy())

        def quick() -> TargetAnswers:
            return answer(self._memory_of(source_of))

        return self._ask("target", answer, source_of, target_ids, positions, quick=quick)

    def _memory_of(self, source: Readable) -> Tensor | None:
        """Returns what the encoder makes of a source, (1, S, D); None of a recurrent model."""
        if not isinstance(self.module, OwnTarget) and is_recurrent(self.module):
            return None
        key = _digest("source", source)
        memory = self._memories.pop(key, None)
        if memory is None:
            with torch.inference_mode():
                read = _as_batch(source)
                memory = (
                    self.module.encode_source(read)
                    if isinstance(self.module, OwnTarget)
                    else _encoded(self.module, read)
                ).numpy()
            if self._folder is not None:
                memory = spooled({"memory": memory}, self._folder)["memory"]
        if len(self._memories) == _MOST_MEMORIES:
            del self._memories[next(iter(self._memories))]
        self._memories[key] = memory
        return torch.from_numpy(memory.copy())  # what is mapped is not writable, which PyTorch wants

    def outputs(self, *inputs: NDArray[Any]) -> dict[str, NDArray[Any]]:
        """Outputs of a model without state by name, for one input; the arguments are those of `outputs`."""
        return self._ask("outputs", lambda: outputs(self.module, *inputs), *inputs)

    def image_embedding(self, pixel_values: NDArray[np.float32]) -> dict[str, NDArray[Any]]:
        """Outputs of the encoder of a segmentation model for an image, (3, height, width) float32."""
        encoder = cast("nn.Module", cast("PromptSegmenter", self.module).encoder)
        return self._ask("encoder", lambda: outputs(encoder, pixel_values), pixel_values)

    def prompt_outputs(self, item: Tensors) -> dict[str, NDArray[np.float32]]:
        """Masks (M, S S) and predicted IoU (M,) of one prompt of a segmentation model."""
        return self._ask("prompt", lambda: prompt_outputs(self.module, item), *item.values())

    def row_outputs(self, role: str, graph: nn.Module, item: Tensors) -> dict[str, NDArray[np.float32]]:
        """Outputs of a graph of this model that draws images or speaks, for one item, by name."""
        return self._ask(role, lambda: row_outputs(graph, item), *item.values())

    def attention_weights(self, inputs: Tensors) -> dict[str, NDArray[np.float32]]:
        """Attention weights of every layer, by the names of the graph `attention`: (H, T, S) float32 each.

        Args:
            inputs: What the graph reads, without the batch.
        """
        tensors = {name: torch.from_numpy(array).unsqueeze(0) for name, array in inputs.items()}
        with torch.inference_mode():
            if isinstance(self.module, OwnText):
                layers = self.module.text_attention(tensors["input_ids"])
                found = {f"attention_{number}": weights for number, weights in enumerate(layers)}
            else:
                found = task_of(self.source.task).attention_graph(self.module)(*tensors.values())
            return {name: weights[0].float().numpy() for name, weights in found.items()}

    def check_is_steady(self) -> None:
        """Asks again what was asked first, after everything else.

        Raises:
            ParityError: The model answers otherwise: it has changed, or it draws numbers at random.
        """
        for kind, (answer, first) in self._first.items():
            difference = max(_difference(*pair) for pair in zip(_arrays(answer()), _arrays(first), strict=True))
            if not difference <= _STEADY_BOUND:
                raise ParityError(
                    f"{type(self.module).__name__} answers the same input ({kind}) otherwise after it has read others: "
                    f"relative difference {difference:.2e}, bound {_STEADY_BOUND:.0e}. It changes itself as it is run, "
                    "or draws at random (a dropout that evaluation mode does not turn off), so nothing can be proved; "
                    "make its answers depend on its input and its weights alone"
                )

    def _ask(
        self, kind: str, answer: Callable[[], Kept], *inputs: Readable, quick: Callable[[], Kept] | None = None
    ) -> Kept:
        """Returns the answer to some inputs, which is computed once as long as there is room for it.

        An answer with other rounding errors is computed and not kept.

        Args:
            kind: What is asked.
            answer: Computes the answer, all of it.
            inputs: What it depends on.
            quick: Computes the same of parts that are kept; None: there are none.
        """
        if is_rounding():
            return answer()
        key = _digest(kind, *inputs)
        if key in self._answers:
            return cast("Kept", self._answers[key])
        found = (quick or answer)()
        self._first.setdefault(kind, (answer, found))
        num_bytes = sum(array.nbytes for array in _arrays(found))
        if self._keeps_answers and self._kept_bytes + num_bytes <= _MOST_KEPT_BYTES:
            assert self._folder is not None, "answers are kept where there is a folder"
            self._answers[key] = _on_disk(found, self._folder)
            self._kept_bytes += num_bytes
        return found


def _digest(kind: str, *inputs: Readable) -> str:
    """Returns what tells some inputs from others."""
    digest = hashlib.sha256(kind.encode())
    arrays = (array for each in inputs for array in (each.values() if isinstance(each, Mapping) else [each]))
    for array in map(np.asarray, arrays):
        digest.update(f"{array.dtype}{array.shape}".encode() + array.tobytes())
    return digest.hexdigest()


def _arrays(answer: Any) -> list[NDArray[Any]]:
    """Returns the arrays of an answer: it is one, or a tuple or a mapping of them."""
    if isinstance(answer, np.ndarray):
        return [answer]
    return list(answer.values() if isinstance(answer, dict) else answer)


def _on_disk(answer: Kept, folder: Path) -> Kept:
    """Returns an answer whose arrays are in a temporary file of a folder."""
    held: Any = answer
    if isinstance(held, np.ndarray):
        held = spooled({"answer": held}, folder)["answer"]
    elif isinstance(held, TargetAnswers):
        held = TargetAnswers(**spooled(held._asdict(), folder))
    else:
        held = spooled(held, folder)
    return cast("Kept", held)


def _difference(again: NDArray[Any], first: NDArray[Any]) -> float:
    """The largest relative error of a second answer; what is masked without end in both is alike."""
    is_masked = np.isinf(first) & (first == again)
    exact, found = (np.where(is_masked, 0, side) for side in (first, again))
    return float(relative_errors(np.atleast_1d(found), np.atleast_1d(exact), of_softmax=False).max(initial=0))


def generation_logits(
    module: nn.Module,
    token_ids: NDArray[np.int64],
    attend: Attend = CAUSAL,
    *,
    first: int = 0,
    positions: NDArray[np.int64] | None = None,
    media: tuple[Tensor, ...] | None = None,
) -> NDArray[np.float32]:
    """Logits after the tokens of a text from the `first` on, or after those asked for.

    `media` are the places of some tokens, (M,), their embeddings, (M, D), and the offsets of positions, (1, T, 3).

    `attend` must compute what `CAUSAL` does.

    Returns:
        (T - first, V), or (P, V), float32.
    """
    kind = decoder_kind(module)
    asked = torch.arange(first, len(token_ids)) if positions is None else torch.from_numpy(positions)
    with torch.inference_mode():
        ids = torch.from_numpy(token_ids).unsqueeze(0)
        if kind is StatefulDecoder:
            return _stateful_logits(cast("StatefulDecoder", module), ids, asked)
        decoder = cast("Decoder | HybridDecoder", module)
        given = ids, torch.arange(len(token_ids)).unsqueeze(0), attend
        if kind is HybridDecoder:
            hybrid = cast("HybridDecoder", module)
            hidden, _ = hybrid.read_attending(*given, hybrid.first_states(1))
        elif media is not None:
            hidden = cast("SeeingDecoder", module).hidden_states_with_media(*given, media)
        else:
            hidden = cast("Decoder", module).hidden_states(*given)
        return decoder.logits(hidden[:, asked])[0].float().numpy()


def _stateful_logits(decoder: StatefulDecoder, ids: Tensor, asked: Tensor) -> NDArray[np.float32]:
    """The same of a decoder with a state, which reads (1, T) tokens in pieces of other lengths than a server's."""
    states, pieces = decoder.first_states(1), []
    for start in range(0, ids.shape[1], _PIECE):
        hidden, states = decoder.read(ids[:, start : start + _PIECE], states)
        here = asked[(asked >= start) & (asked < start + _PIECE)] - start
        pieces.append(decoder.logits(hidden[:, here])[0].float().numpy())
    return np.concatenate(pieces)


def translation_logits(
    module: nn.Module, source_of: Readable, target_ids: NDArray[np.int64], attend: Attend = CAUSAL
) -> NDArray[np.float32]:
    """Logits after every token of a target: (S,), (T,) int64 -> (T, V) float32. `attend` as for a text.

    The source of a caption is an image, (3, height, width) float32; that of a transcript (mel bins, frames) float32.
    """
    return _target_answers(module, source_of, target_ids, attend, np.arange(len(target_ids))).logits


def _as_batch(source: Readable) -> Any:
    """Returns what an encoder reads as a batch of one."""
    if isinstance(source, Mapping):
        return {name: torch.from_numpy(array).unsqueeze(0) for name, array in source.items()}
    return torch.from_numpy(source).unsqueeze(0)


def _encoded(module: nn.Module, source: Any) -> Tensor:
    """Returns what the encoder of an encoder-decoder with attention makes of a source, (1, S, D)."""
    if isinstance(source, Mapping):
        mask = torch.ones_like(source["input_ids"])
        return cast("Tensor", cast("Any", module).encode(**source, attention_mask=mask))
    if source.is_floating_point():
        return cast("ImageToText", module).encode(source)
    return cast("EncoderDecoder", module).encode(source, torch.ones_like(source))


def _target_answers(  # noqa: PLR0917 (what is asked of a target, which belongs together)
    module: nn.Module,
    source_of: Readable,
    target_ids: NDArray[np.int64],
    attend: Attend,
    positions: NDArray[np.int64],
    memory: Tensor | None = None,
) -> TargetAnswers:
    model = cast("EncoderDecoder", module)
    with torch.inference_mode():
        source = _as_batch(source_of)
        if is_recurrent(module):
            mask = torch.ones_like(source)
            return _recurrent_answers(cast("RecurrentEncoderDecoder", module), source, mask, target_ids, positions)
        memory = _encoded(module, source) if memory is None else memory
        mask = torch.ones(memory.shape[:2], dtype=torch.int64)
        keys_values = model.cross_keys_values(memory)
        attend_cross, aligned = cross_attention(keys_values, mask, fused_attention), alignment_layer(len(keys_values))
        weights: list[Tensor] = []

        def attend_noting(query: Tensor, *, layer: int, **scoring: Unpack[Scoring]) -> Tensor:
            if layer == aligned:
                weights.append(attention_weights(query, keys_values[layer][0], **scoring))  # (1, H, T, S)
            return attend_cross(query, layer=layer, **scoring)

        target = torch.from_numpy(target_ids).unsqueeze(0)
        hidden = model.decode(target, torch.arange(len(target_ids)).unsqueeze(0), attend, attend_noting)
        logits = model.logits(hidden[:, torch.from_numpy(positions)])[0]
        return TargetAnswers(logits.float().numpy(), weights[0][0].float().mean(dim=0).numpy())


def _recurrent_answers(
    model: RecurrentEncoderDecoder,
    source: Tensor,
    mask: Tensor,
    target_ids: NDArray[np.int64],
    positions: NDArray[np.int64],
) -> TargetAnswers:
    """The same, one token after another."""
    cross, first = model.encode_source(source, mask, recur_packed)
    states = tuple(state[:, None] for state in first)
    rows, alignment = [], []
    for token in torch.from_numpy(target_ids).reshape(-1, 1, 1):
        logits, states, weights = model.step(token, states, cross, mask)
        rows.append(logits[0, 0])
        alignment.append(weights[0, 0])
    return TargetAnswers(torch.stack(rows).float().numpy()[positions], torch.stack(alignment).float().numpy())


def outputs(module: nn.Module, *inputs: NDArray[Any]) -> dict[str, NDArray[Any]]:
    """Outputs of a model without state by name, for one input.

    Args:
        module: The model.
        inputs: The ids of a text, (T,) int64, and the types of its tokens where the model reads them; or the pixels of
            an image, (3, height, width) float32.

    Returns:
        What the graph declares, without the batch.
    """
    tensors = [torch.from_numpy(array).unsqueeze(0) for array in inputs]
    if not tensors[0].is_floating_point():
        tensors.insert(1, torch.ones_like(tensors[0]))
    with torch.inference_mode():
        return {name: value[0].numpy() for name, value in outputs_of(module, *tensors).items()}


def prompt_outputs(module: nn.Module, item: Tensors) -> dict[str, NDArray[np.float32]]:
    """Masks (M, S S) and predicted IoU (M,) of one prompt of a segmentation model, as `tasks/segmentation` makes it.

    The prompt's image is given by its embedding, of whatever variant: encoder and decoder are compared by themselves.
    """
    tensors = {name: torch.from_numpy(np.asarray(array)).unsqueeze(0) for name, array in item.items()}
    with torch.inference_mode():
        found = cast("PromptSegmenter", module).decoder(earlier_mask=tensors.pop("earlier_mask", None), **tensors)
        return {"masks": found["masks"][0].flatten(1).numpy(), "predicted_iou": found["predicted_iou"][0].numpy()}


def row_outputs(graph: nn.Module, item: Tensors) -> dict[str, NDArray[np.float32]]:
    """Outputs of one of the graphs of a model that draws images or speaks, for one item, by name."""
    tensors = [torch.from_numpy(np.asarray(array)).unsqueeze(0) for array in item.values()]
    with torch.inference_mode():
        return {name: value[0].numpy() for name, value in graph(*tensors).items()}


def cache_ranges(source: ExportSource, inputs: Inputs) -> list[LayerRange]:
    """Lets the fp32 module of a model with a decoder read texts and returns what each layer writes into its cache."""
    recorder, module = _Recorder(), cast("nn.Module", _WithoutLogits(source.module))
    for text in inputs.texts:
        if text.source is None:
            media = None if text.images is None else _media(source, module, text.token_ids, text.images)
            generation_logits(module, text.token_ids, recorder, media=media)
        else:
            translation_logits(module, text.source, text.token_ids, recorder)
    return [recorder.ranges[layer] for layer in sorted(recorder.ranges)]


def _media(
    source: ExportSource, module: nn.Module, token_ids: NDArray[np.int64], images: NDArray[np.float32]
) -> tuple[Tensor, ...]:
    """Embeds the tiles of a prompt; returns what `SeeingDecoder` reads of them."""
    assert source.image_prompt is not None, "a model of images says how they stand in prompts"
    with torch.inference_mode():
        embedded = [cast("SeeingDecoder", module).embed_images(tile[None])[0] for tile in torch.from_numpy(images)]
        found = media_of(source, token_ids, images, torch.stack(embedded).float().numpy())
        offsets = () if found.offsets is None else (torch.from_numpy(found.offsets)[None],)
        return torch.from_numpy(found.positions), torch.cat(embedded), *offsets


class _WithoutLogits:
    """A module whose logits nobody looks at: those of a long text and a large vocabulary may be gigabytes."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def logits(self, hidden_states: Tensor) -> Tensor:
        """(B, T, D) -> (B, T, 1)."""
        return hidden_states[..., :1]


class _Recorder:
    """Causal attention that widens the range of each layer to the keys and values it is given."""

    def __init__(self) -> None:
        self.ranges: defaultdict[int, LayerRange] = defaultdict(LayerRange)

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, *, layer: int, **scoring: Unpack[TextScoring]
    ) -> Tensor:
        """(1, T, ., K), (1, T, G, K), (1, T, G, K) -> (1, T, ., K)."""
        found = self.ranges[layer]
        found.key = np.maximum(found.key, key.abs().amax(dim=(0, 1)).float().numpy())
        found.value = np.maximum(found.value, value.abs().amax(dim=(0, 1)).float().numpy())
        return CAUSAL(query, key, value, layer=layer, **scoring)
