"""From attention weights to maps: which are chosen, what is made of heads, and attention rollout."""

import numpy as np
import pytest

from headway_server.bundles import Graph, TensorSpec
from headway_server.errors import InvalidInputError
from headway_server.tasks.inspection.maps import AttentionPlan, AttentionRequest, Summary, num_bytes_of, rollout


def graph(**layers):
    """A graph whose outputs are so many layers of each kind, with 3 heads."""
    axes = {"cross_attention": ("length", "source_length"), "encoder_attention": ("source_length", "source_length")}
    outputs = [
        TensorSpec(name=f"{kind}_{layer}", dtype="float32", shape=("batch", 3, *axes.get(kind, ("length", "length"))))
        for kind, count in layers.items()
        for layer in range(count)
    ]
    return Graph(file="attention.onnx", inputs=(), outputs=tuple(outputs))


def weights(num_tokens, seed):
    drawn = np.random.default_rng(seed).random((3, num_tokens, num_tokens), np.float32)
    return drawn / drawn.sum(axis=-1, keepdims=True)


OUTPUTS = {f"attention_{layer}": weights(4, layer) for layer in range(2)}


def read(**fields):
    return AttentionPlan(AttentionRequest(**fields), graph(attention=2)).read(OUTPUTS)["attention"]


def test_without_a_choice_there_is_a_map_of_every_head_of_every_layer():
    maps = read()
    assert [(each.layer, each.head) for each in maps] == [(layer, head) for layer in (0, 1) for head in (0, 1, 2)]
    for each in maps:
        np.testing.assert_array_equal(each.weights, OUTPUTS[f"attention_{each.layer}"][each.head])


def test_layers_and_heads_come_once_each_in_the_order_they_were_asked_for():
    maps = read(layers=(1, 0, 1), heads=(2, 0))
    assert [(each.layer, each.head) for each in maps] == [(1, 2), (1, 0), (0, 2), (0, 0)]
    np.testing.assert_array_equal(maps[0].weights, OUTPUTS["attention_1"][2])


def test_only_the_outputs_of_chosen_layers_are_computed():
    assert AttentionPlan(AttentionRequest(layers=(1,)), graph(attention=4)).outputs == ("attention_1",)


def test_a_mean_and_a_maximum_are_taken_over_the_heads_that_were_asked_for():
    mean, maximum = read(summary=Summary.MEAN, heads=(0, 2)), read(summary=Summary.MAXIMUM)
    assert [(each.layer, each.head) for each in mean] == [(0, None), (1, None)]
    np.testing.assert_allclose(mean[1].weights, OUTPUTS["attention_1"][[0, 2]].mean(0), rtol=1e-6)
    np.testing.assert_array_equal(maximum[0].weights, OUTPUTS["attention_0"].max(0))


def test_rollout_is_the_product_of_layers_mixed_with_the_identity():
    half = np.eye(4) / 2
    first, second = (OUTPUTS[f"attention_{layer}"].mean(0).astype(np.float64) for layer in (0, 1))
    expected = (second / 2 + half) @ (first / 2 + half)
    for layers in ((), (1, 0)):
        [found] = read(summary=Summary.ROLLOUT, layers=layers)
        assert (found.layer, found.head) == (None, None)
        np.testing.assert_allclose(found.weights, expected, atol=1e-6)
        np.testing.assert_allclose(found.weights.sum(-1), 1, atol=1e-6)


def test_rollout_of_a_hand_made_example():
    copies = np.array([[0, 1], [0, 1]], np.float32)  # both tokens attend to the second
    np.testing.assert_allclose(rollout([copies]), [[0.5, 0.5], [0, 1]])
    np.testing.assert_allclose(rollout([copies, copies]), [[0.25, 0.75], [0, 1]])


def test_an_encoder_decoder_is_rolled_out_but_for_its_cross_attention():
    plan = AttentionPlan(
        AttentionRequest(summary=Summary.ROLLOUT),
        graph(encoder_attention=1, decoder_attention=2, cross_attention=2),
    )
    outputs = {name: weights(4, seed) for seed, name in enumerate(plan.outputs)}
    maps = plan.read(outputs)
    assert {kind: [each.layer for each in found] for kind, found in maps.items()} == {
        "encoder_attention": [None],
        "decoder_attention": [None],
        "cross_attention": [0, 1],
    }
    only_second = AttentionPlan(AttentionRequest(layers=(1,)), graph(encoder_attention=1, cross_attention=2))
    assert only_second.read(outputs)["encoder_attention"] == []


def test_sizes_are_layers_by_heads_by_rows_by_columns():
    plan = AttentionPlan(AttentionRequest(), graph(encoder_attention=1, decoder_attention=2, cross_attention=2))
    sizes = plan.sizes({"length": 5, "source_length": 7})
    assert sizes == [(1, 3, 7, 7), (2, 3, 5, 5), (2, 3, 5, 7)]
    assert num_bytes_of(sizes) == 4 * 3 * (49 + 2 * 25 + 2 * 35)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"layers": (0, 2)}, r"attention\.layers\[1\]: is 2; this model has 0 to 1"),
        ({"layers": (-1,)}, r"attention\.layers\[0\]: is -1"),
        ({"heads": (3,)}, r"attention\.heads\[0\]: is 3; this model has 0 to 2"),
    ],
)
def test_a_layer_or_head_that_is_not_there_is_refused_with_the_range(fields, message):
    with pytest.raises(InvalidInputError, match=message):
        read(**fields)
