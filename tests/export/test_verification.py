"""A graph that verifies drafts: the bits of decoding one by one, in any precision, and no cost to other steps."""

import dataclasses
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
from bounded_decoder import MAX_LENGTH, NUM_LAYERS, VOCAB_SIZE, traced_decoder

from headway_export.rewriting import (
    AddVerification,
    LayerRange,
    QuantizeCache,
    QuantizeProducts,
    ShortenCaches,
    rewrite,
)
from headway_export.tracing import TracedModel, in_place
from headway_server.bundles import Graph, ParityFigures, Variant
from headway_server.bundles.chain import DECODING_AXES, VERIFIES, chain_width, verifying_axes
from headway_server.decoding.runner.state import SlotState
from headway_server.decoding.speculation.verifier import Verifier
from headway_server.runtime import Cores, Session, sum_exactly

WIDTH, NUM_ROWS = 4, 3
PARITY = ParityFigures(max_relative_logit_error=0.0, bound=None, checked_shape_count=0, provider="none")
LENGTHS = np.array([18, 1, 33])
"""Tokens that each row has read before its drafts: short caches drop positions with the third draft of the first."""


@dataclass(frozen=True, kw_only=True)
class Exported:
    """A graph that was saved, and what a manifest says of it."""

    file: str
    graph: Graph
    traced: TracedModel

    def session(self, fixed_axes, optimized_file=None):
        options = onnxruntime.SessionOptions()
        sum_exactly(options)
        options.intra_op_num_threads = 1
        for axis, size in fixed_axes.items():
            options.add_free_dimension_override_by_name(axis, size)
        if optimized_file is not None:
            options.optimized_model_filepath = str(optimized_file)
        options.log_severity_level = 3
        return onnxruntime.InferenceSession(self.file, options, providers=["CPUExecutionProvider"])

    def new_state(self):
        pasts = [spec for spec in self.graph.inputs if spec.name.startswith("past")]
        sizes = {"slots": NUM_ROWS, "cache_length": MAX_LENGTH}
        return {spec.name: np.zeros([sizes.get(size, size) for size in spec.shape], spec.dtype) for spec in pasts}


@pytest.fixture(
    scope="module",
    params=[
        "fp32",
        "int8",
        "int8, int8 cache",
        "llama, int8, int8 cache",
        "bounded, int8, int8 cache",
        "bounded, short, int8, int8 cache",
    ],
)
def exported(request, tmp_path_factory):
    traced = traced_decoder(is_bounded="bounded" in request.param, is_llama="llama" in request.param)
    if "short" in request.param:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ShortenCaches, "SLACK", 4)
            rewrite(traced.graphs[0].model, shortening := ShortenCaches(MAX_LENGTH))
        state = in_place([spec for spec in traced.graphs[0].inputs if spec.name.startswith("past")], shortening.windows)
        traced = dataclasses.replace(traced, state=state)
    if request.param != "fp32":
        rewrite(traced.graphs[0].model, QuantizeProducts())
    if request.param.endswith("cache"):
        rewrite(traced.graphs[0].model, QuantizeCache([LayerRange(key=3.0, value=3.0)] * NUM_LAYERS))
    rewritten = dataclasses.replace(traced.graphs[0], model=traced.graphs[0].model.clone())
    rewrite(rewritten.model, AddVerification(WIDTH))
    file = tmp_path_factory.mktemp("verification") / "decoder.onnx"
    ir.save(rewritten.model, file)
    graph = Graph(file=file.name, inputs=rewritten.inputs, outputs=rewritten.outputs)
    return Exported(file=str(file), graph=graph, traced=traced)


def decode(session, exported, state, token_ids, positions):
    """Runs a token a row, without sharing memory, and returns logits (R, V); `state` is replaced."""
    feeds = {
        "input_ids": token_ids[:, np.newaxis],
        "position_ids": positions[:, np.newaxis],
        "logits_positions": np.zeros((len(token_ids), 1), np.int64),
        "seqlens_k": positions.astype(np.int32),
        "total_sequence_length": np.array(positions.max() + 1, np.int32),
        VERIFIES: np.zeros(0, np.int64),
    }
    read = {tensor.name for tensor in session.get_inputs()}
    feeds = {name: array for name, array in feeds.items() if name in read}
    names = [tensor.present for tensor in exported.traced.state]
    logits, *presents = session.run(["logits", *names], feeds | state)
    state.update(zip(state, presents, strict=True))
    return logits[:, 0]


def slots_of(exported, arrays):
    """The slots of a server, holding the rows of a state."""
    variant = Variant(
        device="cpu", graphs={"decoder": exported.graph}, state=exported.traced.state, parity=PARITY, quality=None
    )
    slots = SlotState("cpu", variant, num_slots=NUM_ROWS, max_length=MAX_LENGTH)
    for array, kept in zip(slot_arrays(slots), arrays, strict=True):
        array[:] = kept
    return slots


def slot_arrays(slots):
    return [cache.buffer._array for cache in slots._caches]


def read_prompts(session, exported, token_ids):
    """Decodes prompts of different lengths together; returns the state and what followed, which rows overwrite."""
    state = exported.new_state()
    for place in range(LENGTHS.max()):
        positions = np.minimum(place, LENGTHS - 1)
        decode(session, exported, state, token_ids[np.arange(NUM_ROWS), positions], positions)
    return state


def test_verifying_gives_the_bits_of_decoding_and_writes_the_same_state(exported):
    rng = np.random.default_rng(5)
    token_ids = rng.integers(0, VOCAB_SIZE, (NUM_ROWS, MAX_LENGTH))
    plain = exported.session(DECODING_AXES)
    state = read_prompts(plain, exported, token_ids)
    slots = slots_of(exported, state.values())
    session = Session(exported.session(verifying_axes(WIDTH)), graph=exported.graph, device="cpu", cores=Cores(1))
    verifier = Verifier(session, slots, width=WIDTH, vocab_size=VOCAB_SIZE)
    drafted = rng.integers(0, VOCAB_SIZE, (NUM_ROWS, WIDTH))
    verified = verifier.verify(drafted, LENGTHS)
    for place in range(WIDTH):
        expected = decode(plain, exported, state, drafted[:, place], LENGTHS + place)
        np.testing.assert_array_equal(verified[:, place], expected)
    assert len(np.unique(verified.argmax(axis=-1))) > 1, "the model says something"
    for held, array in zip(slot_arrays(slots), state.values(), strict=True):
        (window,) = slots._windows
        for row, length in enumerate(LENGTHS + WIDTH - [window.first(length) for length in LENGTHS + WIDTH]):
            np.testing.assert_array_equal(held[row, :, :length], array[row, :, :length])


def test_fewer_rows_are_verified_alike(exported):
    session = Session(exported.session(verifying_axes(WIDTH)), graph=exported.graph, device="cpu", cores=Cores(1))
    drafted = np.random.default_rng(6).integers(0, VOCAB_SIZE, (NUM_ROWS, WIDTH))
    logits = []
    for rows in (NUM_ROWS, 1):
        slots = slots_of(exported, exported.new_state().values())
        verifier = Verifier(session, slots, width=WIDTH, vocab_size=VOCAB_SIZE)
        logits.append(verifier.verify(drafted[:rows], np.zeros(rows, np.int64)).copy())
    np.testing.assert_array_equal(logits[0][:1], logits[1])


def test_a_session_that_decodes_runs_the_operators_it_would_run_without(exported, tmp_path):
    without = tmp_path / "without.onnx"
    ir.save(exported.traced.graphs[0].model, without)
    graph = Graph(file=without.name, inputs=exported.traced.graphs[0].inputs, outputs=())
    plain = Exported(file=str(without), graph=graph, traced=exported.traced)
    plain.session({}, tmp_path / "plain.onnx")
    exported.session(DECODING_AXES, tmp_path / "rewritten.onnx")
    kinds = [
        sorted(
            node.op_type for node in ir.load(tmp_path / f"{name}.onnx").graph if node.op_type not in ("Sub", "Shape")
        )
        for name in ("plain", "rewritten")
    ]
    assert kinds[0] == kinds[1]


def test_the_graph_tells_how_many_tokens_it_verifies_and_the_old_one_none(exported):
    present = exported.traced.state[0].present
    old = exported.traced.graphs[0]
    assert chain_width(exported.graph, present) == WIDTH
    assert chain_width(Graph(file="old.onnx", inputs=old.inputs, outputs=old.outputs), present) == 1
    assert VERIFIES not in {value.name for value in old.model.graph.inputs}, "the traced graph stays as it is"
