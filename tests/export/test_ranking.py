"""Logits ranked in the graph, against a sort of the whole row."""

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
from onnx import TensorProto, helper

from headway_export.errors import ParityError
from headway_export.parity import check_ranking
from headway_export.rewriting import RankLogits, rewrite
from headway_server.decoding.interfaces import Ranking
from headway_server.runtime import sum_exactly


def ranked_graph(vocab_size: int) -> ir.Model:
    """A decoder without a network: it is given its logits."""
    shape = ["slots", "logits_length", vocab_size]
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name in ("given", "logits")]
    graph = helper.make_graph([helper.make_node("Identity", ["given"], ["logits"])], "decoder", values[:1], values[1:])
    model = ir.from_proto(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10))
    rewrite(model, RankLogits())
    return model


class Ranked:
    """A session of such a graph on one thread."""

    def __init__(self, vocab_size: int) -> None:
        options = onnxruntime.SessionOptions()
        sum_exactly(options)
        options.intra_op_num_threads = 1
        content = ir.to_proto(ranked_graph(vocab_size)).SerializeToString()
        self._session = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])

    def rank(self, logits: np.ndarray, count: int) -> Ranking:
        feeds = {"given": logits[:, np.newaxis], "num_likeliest": np.array([count])}
        names = ["likeliest_ids", "likeliest_logits", "exponential_means"]
        token_ids, values, means = (output[:, 0] for output in self._session.run(names, feeds))
        return Ranking(token_ids, values, np.log(means, dtype=np.float64) + np.log(logits.shape[1]))


EVEN = [8, 24, 300, 4000, 32000]
UNEVEN = [1, 2, 5, 7, 131, 4003, 4006]  # multiples of no size of a group
BY_ROWS = [32801, 40000, 58101, 96103]  # filled up, in groups of 32 and 107, and filled up


@pytest.mark.parametrize("vocab_size", [*EVEN, *UNEVEN, *BY_ROWS])
def test_the_graph_ranks_as_a_sort_does_and_puts_the_lower_id_first_among_equals(vocab_size):
    rng = np.random.default_rng(vocab_size)
    graph = Ranked(vocab_size)
    for num_rows in (1, 5):
        for count in sorted({min(count, vocab_size) for count in (1, 2, 8, 40)}):
            plain = (rng.normal(size=(num_rows, vocab_size)) * 3).astype(np.float32)
            tied = np.round(plain)
            sparse = np.where(rng.random(plain.shape) < 0.9, np.float32(-np.inf), tied)
            sparse[:, vocab_size // 2] = 0
            last = np.where(np.arange(vocab_size) < vocab_size - 1, np.float32(-np.inf), tied)
            for logits in (plain, tied, sparse, last, np.zeros_like(plain)):
                check_ranking(graph.rank(logits, count), logits, f"{num_rows} rows, {count} tokens")


@pytest.mark.parametrize("vocab_size", [24, 40, 4000, 4008, 32000, 5, 4003, 58101, 96103])
def test_a_row_is_ranked_alike_in_any_company_to_the_last_bit(vocab_size):
    logits = np.random.default_rng(3).normal(size=(30, vocab_size)).astype(np.float32)
    graph = Ranked(vocab_size)
    count = min(8, vocab_size)
    together = graph.rank(logits, count)
    for row in range(30):
        alone = graph.rank(logits[row : row + 1], count)
        assert alone.token_ids.tolist() == [together.token_ids[row].tolist()]
        assert alone.normalizers.tolist() == [together.normalizers[row]]


@pytest.mark.parametrize(("vocab_size", "places"), [(4000, (0, 1, 31, 32, 3999)), (4003, (4002,)), (58101, (58100,))])
@pytest.mark.parametrize("spoilt", [np.nan, np.inf])
def test_the_mean_says_that_a_row_means_nothing(spoilt, vocab_size, places):
    logits = np.random.default_rng(4).normal(size=(3, vocab_size)).astype(np.float32)
    graph = Ranked(vocab_size)
    for place in places:
        one = logits.copy()
        one[1, place] = spoilt
        assert np.isfinite(graph.rank(one, min(8, vocab_size)).normalizers).tolist() == [True, False, True]


def test_a_wrong_ranking_is_no_proof():
    logits = np.array([[0.0, 2.0, 2.0, 1.0]], np.float32)
    exact = np.log(np.exp(logits.astype(np.float64)).sum(axis=1))
    check_ranking(Ranking(np.array([[1, 2]]), np.full((1, 2), 2, np.float32), exact), logits, "here")
    for ids, normalizers in (([[2, 1]], exact), ([[1, 2]], exact + 1e-4)):
        with pytest.raises(ParityError, match="ranking at here"):
            check_ranking(Ranking(np.array(ids), np.full((1, 2), 2, np.float32), normalizers), logits, "here")
