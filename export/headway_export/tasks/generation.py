"""Texts that go on from a beginning.

T tokens, V vocabulary, R rows of a step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any, ClassVar, cast

import numpy as np
import torch
from numpy.typing import NDArray
from onnx_ir.passes import InPlacePass
from torch import nn

from headway_export import parity, synthetic, tracing
from headway_export.agreement import Rows, distributions
from headway_export.candidate import (
    Candidate,
    media_of,
    open_verifier,
    pixel_values_of,
    run_batch,
    verifying_width,
)
from headway_export.differences import relative_errors
from headway_export.errors import ParityError, SourceError
from headway_export.graphs import (
    DecoderAttentionGraph,
    DecoderGraph,
    HybridDecoderGraph,
    ImageEncoderGraph,
    SeeingDecoderGraph,
    StatefulDecoderGraph,
)
from headway_export.inputs import (
    HELD_OUT_SHARE,
    LENGTHS,
    NUM_CALIBRATED,
    DecoderText,
    Draw,
    Inputs,
    affordable,
    apart,
    evenly,
    write_on,
)
from headway_export.quality import NUM_EXAMPLES, Quality, figure_of, nats_of_window, quoted
from headway_export.reference import Reference
from headway_export.rewriting import AddVerification
from headway_export.source import EvaluationData, ExportSource, TextRow, find_chat_template, read_rows, validated
from headway_export.tasks.task import ExportTask, Metric
from headway_server.batching import BatchGraph, Tensors
from headway_server.bundles import (
    IMAGE_EMBEDDINGS,
    MEDIA_EMBEDDINGS,
    MEDIA_POSITIONS,
    POSITION_OFFSETS,
    Limits,
    StateTensor,
    TensorSpec,
    demanded,
)
from headway_server.decoding.runner.decoder import DecoderRunner
from headway_server.decoding.runner.state import SlotState
from headway_server.runtime import Session
from headway_training.checkpoint import Checkpoint
from headway_training.evaluation import evaluation_windows
from headway_training.models.protocols import (
    Decoder,
    HybridDecoder,
    SeeingDecoder,
    StatefulDecoder,
    decoder_kind,
    sees,
)

_NUM_PREDICTIONS = (384, 2048)
"""The least and the most."""
NUM_SHOWN = 16
"""Images that variants are judged by, each before a text."""
_START = 4
"""Tokens of a beginning that a generator goes on from."""
_VERIFIED_BOUND = 1e-2
"""Relative difference of logits between verifying drafts and decoding; most variants have none at all."""


class Generation(ExportTask):
    """A decoder, with a cache of keys and values or with a state."""

    metrics = (Metric(name="nats_per_character", allowed_loss=0.02, higher_is_better=False),)
    optional_flags: ClassVar[tuple[str, ...]] = ("--chat-template",)
    protocols: ClassVar[tuple[type, ...]] = (Decoder, HybridDecoder, StatefulDecoder)
    takes_int4: ClassVar[bool] = True
    has_cache = True
    attends_by_operator = False
    attention_graph = DecoderAttentionGraph
    more_outputs: ClassVar[type[InPlacePass] | None] = AddVerification  # of drafts
    inspection = "inspect-generation TEXT"

    def limits(self, module: nn.Module) -> Limits:
        """Reads those of prompts and of all."""
        length = int(cast("Any", module).max_length)
        return Limits(max_input_tokens=int(getattr(module, "max_prompt_length", length - 1)), max_total_tokens=length)

    def parts_of_checkpoint(self, path: Path, module: nn.Module, checkpoint: Checkpoint) -> dict[str, Any]:
        """Adds the chat template."""
        return super().parts_of_checkpoint(path, module, checkpoint) | {"chat_template": find_chat_template(path)}

    def read_examples(self, file: Path, num_labels: int) -> dict[str, Any]:
        """Reads texts."""
        return {"texts": [row.text for row in validated(TextRow, read_rows(file))]}

    def trace(self, asked: tracing.Traceable) -> tracing.TracedModel:
        """Traces a decoder, with a cache, with states or with both."""
        with tracing.following_the_protocol(asked.module):
            kind = decoder_kind(asked.module)
        if kind is not Decoder:
            return trace_stateful(asked.module)
        return trace_seeing_decoder(asked) if sees(asked.module) else trace_decoder(asked.module)

    def check_attention(self, module: nn.Module) -> None:
        """Refuses a decoder with a state."""
        if decoder_kind(module) is not Decoder:
            raise SourceError(
                f"{type(module).__name__}: has a state in place of attention to its tokens; leave out --attention"
            )

    def attention_inputs(self, asked: tracing.Traceable) -> list[TensorSpec]:
        """Texts."""
        return [tracing.make_spec("input_ids", "int64", "batch", "length")]

    def compare(self, candidate: Candidate, reference: Reference, comparison: parity.Comparison) -> None:
        """Holds prompts, read in chunks, and what is decoded after them, against PyTorch; and drafts that are verified.

        The longest text, which is alone, is compared at all its positions; others from the end of the prompt on.
        """
        max_length = candidate.source.limits.max_total_tokens
        assert max_length is not None, "the source has read the module's length"
        session = candidate.open_session()
        num_steps = min(parity.DECODED_TOKENS, max_length - 1)
        texts: Sequence[NDArray[np.int64]] = ()
        for rows in parity.batches(max_length - num_steps):
            runner = candidate.open_decoder(len(rows), max_length=max(rows) + num_steps, session=session)
            texts = texts or parity.sample_tokens(candidate.source, runner.vocab_size, max_length, frame=False)
            prompts = [texts[row % len(texts)][:length] for row, length in enumerate(rows)]
            asked = [
                parity.asked_positions(len(prompt), runner.vocab_size)
                if len(rows) == 1
                else np.array([len(prompt) - 1])
                for prompt in prompts
            ]
            first = [parity.read_text(runner, slot, prompt, asked[slot]) for slot, prompt in enumerate(prompts)]
            steps = [np.stack([logits[-1] for logits in first])]  # (R, V)
            positions = np.array([len(prompt) for prompt in prompts])
            for _ in range(num_steps):
                logits = runner.decode(steps[-1].argmax(axis=-1), positions).copy()
                steps.append(logits)
                positions = positions + 1
            where = f"batch {len(rows)}, prompt lengths {rows}"
            written: list[tuple[NDArray[np.int64], NDArray[np.float32], NDArray[np.float32]]] = []
            for row, prompt in enumerate(prompts):
                decoded = np.stack([step[row] for step in steps])  # (T, V), after the prompt and after each token
                text = np.concatenate([prompt, decoded[:-1].argmax(axis=-1)])
                found = np.concatenate([first[row][:-1], decoded])
                compared = np.concatenate([asked[row][:-1], np.arange(len(prompt) - 1, len(text))])
                again = partial(reference.text_logits, text, compared)
                expected = again()
                comparison.add("logits", found, expected, where, again)
                comparison.add_greedy(found.argmax(axis=-1), expected, where, again)
                written.append((text, decoded, expected[-len(decoded) :]))
            comparison.num_shapes += len(set(rows))
        if candidate.source.image_prompt is not None:
            _compare_images(candidate, reference, comparison, session)
        assert runner is not None, "there is a batch"
        _take_back(runner, written, verifying_width(candidate))
        state = runner.state
        del runner  # and its session: that of the drafts holds the weights again
        _compare_drafts(candidate, state, written, comparison, reference)

    def attention_items(self, candidate: Candidate) -> Iterator[list[Tensors]]:
        """Yields texts."""
        for batch, _ in parity.attention_texts(candidate, frame=False):
            yield [{"input_ids": text} for text in batch]

    def answers(self, candidate: Candidate, inputs: Inputs) -> Iterator[Rows]:
        """Yields logarithms of the probabilities of tokens."""
        return distributions(candidate, inputs.texts)

    def inputs_of(
        self, source: ExportSource, data: EvaluationData, most: int | None, candidate: Candidate | None
    ) -> Inputs:
        """Returns windows of the model's length."""
        texts = list(self._windows(source, data))
        needed = _num_predictions(source) // max(1, sum(len(text.token_ids) for text in texts) // len(texts)) + 1
        return Inputs(dataset=data.dataset, texts=tuple(evenly(texts, most or needed)))

    def _windows(self, source: ExportSource, data: EvaluationData) -> Iterator[DecoderText]:
        limit = source.limits.max_total_tokens
        assert limit is not None, "a decoder has a length"
        for ids in source.encode(data.texts, frame=False):
            for start, end, _ in evaluation_windows(len(ids), limit):
                yield DecoderText(token_ids=ids[start:end])

    def draw(self, draw: Draw) -> tuple[list[Any], list[Any]]:
        """Returns windows of texts that are given, or texts that the model writes; some of them after an image."""
        judged, calibration = _windows_of_given(draw) if draw.source.texts else _written(draw)
        if draw.source.image_prompt is None:
            return judged, calibration
        shown = _after_images(draw, judged, NUM_SHOWN)
        return [*judged, *shown], [*calibration, *_after_images(draw, calibration, NUM_SHOWN // 2)]

    def hold_out(self, source: ExportSource, data: EvaluationData) -> tuple[EvaluationData, EvaluationData] | None:
        """Takes the end of each of a few long texts."""
        length = source.limits.max_total_tokens
        if length is None:
            return None
        num_tokens = sum(map(len, source.encode(data.texts, frame=False)))
        share = NUM_CALIBRATED * length / max(num_tokens, 1)
        if share * HELD_OUT_SHARE > 1:
            return None
        ends = [len(text) - int(len(text) * share) for text in data.texts]
        parts = list(zip(data.texts, ends, strict=True))
        return (
            replace(data, texts=[text[:end] for text, end in parts]),
            replace(data, texts=[text[end:] for text, end in parts]),
        )

    def measure(self, candidate: Candidate, data: EvaluationData) -> Quality:
        """Reads texts in windows of the model's length that overlap by half, counting each token once."""
        tokenizer = candidate.source.tokenizer
        assert tokenizer is not None, "a text model has its tokenizer"
        runner = candidate.open_decoder(1)
        characters = 0
        stretches: list[tuple[str, float]] = []
        for text in data.texts:
            (ids,) = candidate.source.encode([text], frame=False)
            for start, end, predicted in evaluation_windows(len(ids), runner.max_length):
                stretch = tokenizer.decode(ids[predicted:end].tolist(), skip_special_tokens=False)
                stretches.append((stretch, nats_of_window(runner, ids[start:end], predicted - start)))
            characters += len(text) - len(tokenizer.decode(ids[:1].tolist(), skip_special_tokens=False))
        nats = sum(nats for _, nats in stretches)
        return Quality(figure=figure_of(data, nats / characters), weak_points=weak_stretches(stretches))


# Parity


def _compare_images(
    candidate: Candidate, reference: Reference, comparison: parity.Comparison, session: Session
) -> None:
    """Holds embeddings of tiles, alone and together, and prompts with images, against PyTorch.

    Raises:
        ParityError: They differ.
    """
    source = candidate.source
    prompt, limit = demanded(source.image_prompt), source.limits.max_total_tokens
    assert limit is not None, "the source has read the module's length"
    tiles = _sample_tiles(source)
    graph = BatchGraph(candidate.runtime.open(candidate.bundle, candidate.variant.graphs["image_encoder"]))
    for rows in (tiles[:1], tiles, _sample_tiles(source, is_upright=True)[:1]):
        found = [outputs[IMAGE_EMBEDDINGS] for outputs in run_batch(graph, [{"pixel_values": tile} for tile in rows])]
        for tile, embedding in zip(rows, found, strict=True):
            again = partial(reference.tile_embeddings, tile)
            comparison.add(IMAGE_EMBEDDINGS, embedding, again(), f"batch {len(rows)} of images", again)
        comparison.num_shapes += 1
    sampled = parity.sample_tokens(source, candidate.vocab_size, 16, frame=False)
    texts = [_without(text, prompt.token) for text in sampled]
    for count in (1, 2):
        image = [prompt.token] * _num_tokens(source, tiles[0])
        ids = np.concatenate([texts[0][:5], *[image, texts[1][:7]] * count])
        if len(ids) + parity.DECODED_TOKENS > limit:
            continue
        shown, num_given = tiles[:count], len(ids)
        [embedded] = candidate.embed_tiles([shown])
        runner = candidate.open_decoder(1, max_length=len(ids) + parity.DECODED_TOKENS, session=session)
        asked = np.arange(len(ids) - 12, len(ids))
        steps = [parity.read_text(runner, 0, ids, asked, media=media_of(source, ids, shown, embedded))]
        for _ in range(parity.DECODED_TOKENS):
            token = _without(steps[-1][-1:].argmax(axis=-1), prompt.token)  # PyTorch would look for its image
            steps.append(runner.decode(token, np.array([len(ids)])).copy())
            ids = np.append(ids, token)
        found_logits = np.concatenate(steps)
        asked = np.arange(len(ids) - len(found_logits), len(ids))
        where = f"prompt of {len(ids)} tokens with {count} images"
        again = partial(reference.image_logits, shown, ids, asked, num_given)
        expected = again()
        comparison.add("logits", found_logits, expected, where, again)
        comparison.add_greedy(found_logits.argmax(axis=-1), expected, where, again)
        comparison.num_shapes += 1


def _take_back(
    runner: DecoderRunner,
    written: Sequence[tuple[NDArray[np.int64], NDArray[np.float32], NDArray[np.float32]]],
    width: int,
) -> None:
    """Lets slots read their texts again up to the last `width` tokens, where a window has dropped what these see."""
    for slot, (text, decoded, _) in enumerate(written):
        stop = len(text) - width
        if runner.can_return(stop, len(text)):
            continue
        num_read = min(len(text) - len(decoded) + 1, stop)
        parity.read_text(runner, slot, text[:num_read], np.array([num_read - 1]))
        for position in range(num_read, stop):
            runner.decode(text[position : position + 1], np.array([position]), slot)


def _compare_drafts(
    candidate: Candidate,
    state: SlotState,
    written: Sequence[tuple[NDArray[np.int64], NDArray[np.float32], NDArray[np.float32]]],
    comparison: parity.Comparison,
    reference: Reference,
) -> None:
    """Verifies the last tokens of texts as drafts, if the graph can, against decoding them and against PyTorch.

    Args:
        candidate: The variant.
        state: Slots that hold the texts.
        written: Each text, (T,), what decoding gave for its end, and what PyTorch gives for the same, (., V) each.
        comparison: Where the figures go.
        reference: PyTorch.

    Raises:
        ParityError: They differ.
    """
    verifier = open_verifier(candidate, state)
    if verifier is None or len(written[0][1]) <= verifier.width:
        return
    width = verifier.width
    drafts = np.stack([text[-width:] for text, _, _ in written])
    starts = np.array([len(text) - width for text, _, _ in written])
    verified = verifier.verify(drafts, starts)  # (R, width, V)
    for row, (text, decoded, expected) in enumerate(written):
        where = f"drafts of {width} tokens verified at position {len(text) - width} of a batch of {len(written)}"
        again = partial(reference.text_logits, text, np.arange(len(text) - width, len(text)))
        comparison.add("logits", verified[row], expected[-width:], where, again)
        error = relative_errors(verified[row], decoded[-width:], of_softmax=True).max()
        if not error <= _VERIFIED_BOUND:
            raise ParityError(
                f"{candidate.precision}: {where}: logits differ by {error:.2e} from those of decoding one by one, "
                f"bound {_VERIFIED_BOUND:.0e}"
            )


# Inputs


def _num_predictions(source: ExportSource) -> int:
    """Returns how many tokens a generator predicts, each of which it may have to write first."""
    return affordable(source, 2, *_NUM_PREDICTIONS)


def _windows_of_given(draw: Draw) -> tuple[list[Any], list[Any]]:
    """Cuts the texts that are given into windows."""
    source, limit = draw.source, draw.source.limits.max_total_tokens
    assert limit is not None, "a decoder has a length"
    prefix = np.array(source.prompt_prefix, np.int64)
    texts = [np.concatenate([prefix, ids]) for ids in source.encode(source.texts, frame=False)]
    windows = [text[start : start + limit] for text in texts for start in range(0, len(text), limit)]
    windows = [window for window in windows if len(window) > 1] or texts[:1]
    judged, calibration = apart([DecoderText(token_ids=window) for window in windows])
    length = max(1, sum(len(text.token_ids) for text in judged) // len(judged))
    few = evenly(judged, _num_predictions(source) // length + 1)
    return few, few if judged is calibration else calibration


def _written(draw: Draw) -> tuple[list[Any], list[Any]]:
    """Lets the model write: short texts, and as many predictions in texts of the model's length."""
    source, limit = draw.source, draw.source.limits.max_total_tokens
    assert limit is not None, "a decoder has a length"
    assert source.tokenizer is not None, "a text model has its tokenizer"
    prefix = np.array(source.prompt_prefix, np.int64)
    length = min(limit, LENGTHS[1] + len(prefix))
    total = _num_predictions(source)
    half = total // 2 if limit > length else total
    count = -(-half // length)
    num_calibrated = max(8, count // 4)
    beginnings = _beginnings(draw, count + num_calibrated, min(_START, length - 1))
    starts = np.stack([np.concatenate([prefix, one])[:length] for one in beginnings])
    tokens = source.special_tokens
    ends = () if tokens is None or tokens.eos is None else (tokens.eos, *tokens.more_eos)
    written: list[NDArray[np.int64]] = []
    session = draw.candidate.open_session()
    for at in range(0, len(starts), NUM_CALIBRATED):
        some = starts[at : at + NUM_CALIBRATED]
        runner = draw.candidate.open_decoder(len(some), max_length=length, session=session)
        forbidden = (*source.suppressed_tokens, *ends)
        written += write_on(runner, some, length, np.ones(len(some), bool), (), forbidden, draw.generator)
    judged, calibration = written[:count], written[count:]
    return _with_long(draw, judged, len(prefix), half), _with_long(draw, calibration, len(prefix), 1)


def _after_images(draw: Draw, texts: Sequence[DecoderText], count: int) -> list[DecoderText]:
    """Puts a drawn image of one tile before the first tokens of texts."""
    source = draw.source
    prompt, limit = demanded(source.image_prompt), demanded(source.limits.max_total_tokens)
    height, width = _tile_size(source)
    tiles = _as_tiles(source, pixel_values_of(source, synthetic.draw_images(count, height, width, draw.generator)))
    image = np.full(_num_tokens(source, tiles[0]), prompt.token)
    return [
        DecoderText(
            token_ids=np.concatenate([image, _without(text.token_ids[: LENGTHS[1]], prompt.token)])[:limit],
            num_given=len(image) + 1,
            images=tile[np.newaxis],
        )
        for text, tile in zip(cycle(texts), tiles, strict=False)
        if len(image) + 1 < limit
    ]


def _tile_size(source: ExportSource) -> tuple[int, int]:
    """Returns height and width of a tile, or of a small image of a model of any size."""
    sizes = demanded(source.image_preprocessing)
    return (5 * sizes.multiple, 7 * sizes.multiple) if sizes.has_cells else (sizes.height, sizes.width)


def _sample_tiles(source: ExportSource, *, is_upright: bool = False) -> NDArray[np.float32]:
    """Returns three tiles, or images of a model of any size, which may be upright."""
    height, width = _tile_size(source)[:: -1 if is_upright else 1]
    images = np.random.default_rng(parity.SEED).integers(0, 256, (3, height, width, 3)).astype(np.uint8)
    return _as_tiles(source, pixel_values_of(source, images))


def _as_tiles(source: ExportSource, pixels: NDArray[np.float32]) -> NDArray[np.float32]:
    """(N, 3, height, width) -> the same, or (N, 3, rows, cell, columns, cell) of a model of any size."""
    sizes = demanded(source.image_preprocessing)
    if not sizes.has_cells:
        return pixels
    count, channels, height, width = pixels.shape
    side = sizes.multiple
    return pixels.reshape(count, channels, height // side, side, width // side, side)


def _num_tokens(source: ExportSource, tile: NDArray[np.float32]) -> int:
    """Returns the tokens of a tile."""
    return demanded(source.image_prompt).tokens_per_tile or tile.shape[1] * tile.shape[3]


def _without(token_ids: NDArray[np.int64], token: int) -> NDArray[np.int64]:
    """Returns tokens, (T,), with another one in place of `token`."""
    return np.where(token_ids == token, max(token - 1, 0), token_ids)


def _with_long(draw: Draw, texts: list[NDArray[np.int64]], num_prefix: int, wanted: int) -> list[DecoderText]:
    """Adds texts of the model's length that are joined from the others, of `wanted` tokens in all, one at least."""
    limit = draw.source.limits.max_total_tokens
    assert limit is not None, "a decoder has a length"
    found = [*texts]
    for _ in range(max(1, wanted // limit) if limit > len(texts[0]) else 0):
        order = draw.generator.permutation(len(texts))
        joined = np.concatenate([texts[place][num_prefix:] for place in order])
        found.append(np.concatenate([texts[0][:num_prefix], np.resize(joined, limit)])[:limit])
    return [DecoderText(token_ids=ids) for ids in found]


def _beginnings(draw: Draw, count: int, length: int) -> list[NDArray[np.int64]]:
    """Draws the first tokens of texts."""
    assert draw.source.tokenizer is not None, "a text model has its tokenizer"
    texts = synthetic.draw_texts(draw.source.tokenizer, [4 * length] * count, draw.generator)
    common = np.array(synthetic.common_tokens(draw.source.tokenizer)[: 4 * length])
    encoded = draw.source.encode(texts, frame=False)  # may be of fewer tokens than were drawn
    return [np.concatenate([ids, draw.generator.choice(common, length)])[:length] for ids in encoded]


# The card


def weak_stretches(stretches: Sequence[tuple[str, float]]) -> tuple[str, ...]:
    """The stretches of text that a model expects least.

    Args:
        stretches: Text and its negative log-likelihood in nats.
    """
    rates = [(nats / len(text), text) for text, nats in stretches if text]
    worst = sorted(rates, key=lambda pair: -pair[0])[:NUM_EXAMPLES]
    return tuple(f"{rate:.2f} nats per character: {quoted(text)}" for rate, text in worst)


# Graphs

_STATEFUL_INPUTS = ("input_ids", "logits_positions")
"""Of a step, what a decoder reads whose state has no positions."""


def trace_decoder(module: nn.Module) -> tracing.TracedModel:
    """Traces a decoder with a cache."""
    past = tracing.past_specs(module, has_source=False)
    inputs = [*(tracing.make_spec(*step) for step in tracing.STEP_INPUTS), *past]
    decoder = tracing.trace_graph("decoder", module, DecoderGraph(module), inputs)
    state = tracing.caches_of(decoder, past, max_length=cast("Decoder", module).max_length)
    return tracing.TracedModel(graphs=(decoder,), state=state)


def trace_seeing_decoder(asked: tracing.Traceable) -> tracing.TracedModel:
    """Traces a decoder with a cache whose prompts may have images, and what embeds these."""
    module, graph = asked.module, ImageEncoderGraph(asked.module)
    side = cast("SeeingDecoder", module).cell
    if side is None:
        encoder = tracing.trace_graph("image_encoder", module, graph, [asked.pixels])
        width = encoder.outputs[0].shape[-1]
    else:
        pixels = tracing.make_spec("pixel_values", "float32", "batch", 3, "rows", side, "columns", side)
        with tracing.following_the_protocol(module):
            width = graph(torch.zeros(1, 3, 2, side, 2, side))[IMAGE_EMBEDDINGS].shape[-1]
        embeddings = tracing.make_spec(IMAGE_EMBEDDINGS, "float32", "batch", "tokens", width)
        encoder = tracing.trace_graph("image_encoder", module, graph, [pixels], outputs=[embeddings])
    past = tracing.past_specs(module, has_source=False)
    media = [
        tracing.make_spec(MEDIA_POSITIONS, "int64", "media"),
        tracing.make_spec(MEDIA_EMBEDDINGS, "float32", "media", width),
    ]
    if cast("SeeingDecoder", module).has_grid_positions:
        media.append(tracing.make_spec(POSITION_OFFSETS, "int64", "slots", "length", 3))
    inputs = [*(tracing.make_spec(*step) for step in tracing.STEP_INPUTS), *media, *past]
    decoder = tracing.trace_graph("decoder", module, SeeingDecoderGraph(module), inputs)
    state = tracing.caches_of(decoder, past, max_length=cast("Decoder", module).max_length)
    return tracing.TracedModel(graphs=(encoder, decoder), state=state)


def trace_stateful(module: nn.Module) -> tracing.TracedModel:
    """Traces a decoder with states of fixed size, with or without a cache beside them."""
    is_hybrid = decoder_kind(module) is HybridDecoder
    with tracing.following_the_protocol(module):
        first = cast("HybridDecoder | StatefulDecoder", module).first_states(2)
    states = tuple(
        StateTensor(past=f"past_state_{number}", present=f"present_state_{number}", update="replace")
        for number in range(len(first))
    )
    past = [
        tracing.make_spec(state.past, str(tensor.dtype).removeprefix("torch."), "slots", *tensor.shape[1:])
        for state, tensor in zip(states, first, strict=True)
    ]
    cached = tracing.past_specs(module, has_source=False) if is_hybrid else []
    steps = [step for step in tracing.STEP_INPUTS if is_hybrid or step[0] in _STATEFUL_INPUTS]
    inputs = [*(tracing.make_spec(*step) for step in steps), *cached, *past]
    graph = HybridDecoderGraph(module, len(first)) if is_hybrid else StatefulDecoderGraph(module)
    present = tracing.declare_outputs(module, graph, inputs)[1 + len(cached) :]
    if not past or [spec.shape for spec in present] != [spec.shape for spec in past]:
        raise SourceError(
            f"{type(module).__name__}: it was given states {[spec.shape for spec in past]} and returned "
            f"{[spec.shape for spec in present]}; it returns at least one, each of the shape it was given"
        )
    decoder = tracing.trace_graph("decoder", module, graph, inputs)
    caches = tracing.caches_of(decoder, cached, max_length=cast("HybridDecoder", module).max_length)
    return tracing.TracedModel(graphs=(decoder,), state=(*caches, *states))
