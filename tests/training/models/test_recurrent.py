"""The recurrent encoder-decoder: its parts against torch's and the paper's equations, its step against its forward."""

from typing import Any

import pytest
import torch
from torch import nn

from headway_training.evaluation import translate_greedily
from headway_training.models import (
    RecurrentConfig,
    RecurrentTranslator,
    build_model,
    count_parameters,
    named_configuration,
)
from headway_training.models.recurrent import AdditiveAttention, StateGates, recur_packed

FIELDS: dict[str, Any] = {
    "vocabulary_size": 30,
    "max_source_length": 20,
    "max_target_length": 16,
    "d_embedding": 8,
    "d_state": 12,
    "d_attention": 10,
}


@pytest.fixture
def model() -> RecurrentTranslator:
    torch.manual_seed(0)
    model = build_model("recurrent", FIELDS).eval()
    assert isinstance(model, RecurrentTranslator)
    return model


@pytest.fixture
def batch() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    source = torch.randint(4, 30, (3, 9), generator=generator)
    mask = (torch.arange(9) < torch.tensor([[9], [4], [1]])).long()
    return source, mask, torch.randint(4, 30, (3, 7), generator=generator)


@torch.inference_mode()
def test_steps_give_the_logits_of_the_training_forward(model, batch) -> None:
    source, mask, target = batch
    expected = model(source, mask, target)
    cross, (first,) = model.encode_source(source, mask)
    states = (first[:, None],)
    for position in range(target.shape[1]):
        logits, states, weights = model.step(target[:, position : position + 1], states, cross, mask)
        torch.testing.assert_close(logits[:, 0], expected[:, position])
        torch.testing.assert_close(weights.sum(-1), torch.ones(3, 1))
        assert not weights[:, 0][mask == 0].any()


@torch.inference_mode()
def test_rows_of_a_sentence_step_as_if_each_were_alone(model, batch) -> None:
    source, mask, target = batch
    cross, (first,) = model.encode_source(source, mask)
    beams = (torch.stack((first, first.flip(-1)), dim=1),)  # (B, 2, H)
    logits, (states,), weights = model.step(target[:, :2], beams, cross, mask)
    for row in range(2):
        alone = model.step(target[:, row : row + 1], (beams[0][:, row : row + 1],), cross, mask)
        torch.testing.assert_close(logits[:, row], alone[0][:, 0])
        torch.testing.assert_close(states[:, row], alone[1][0][:, 0])
        torch.testing.assert_close(weights[:, row], alone[2][:, 0])


@torch.inference_mode()
def test_a_sentence_is_the_same_alone_and_padded_among_others(model, batch) -> None:
    source, mask, target = batch
    together = model(source, mask, target)
    for row, length in enumerate(mask.sum(1).tolist()):
        alone = model(source[row : row + 1, :length], mask[row : row + 1, :length], target[row : row + 1])
        torch.testing.assert_close(together[row], alone[0])


def test_gates_are_those_of_torchs_cell() -> None:
    torch.manual_seed(2)
    cell, gates = nn.GRUCell(5, 6), StateGates(6)
    gates.linear.weight, gates.linear.bias = cell.weight_hh, cell.bias_hh
    inputs, state = torch.randn(4, 5), torch.randn(4, 6)
    from_inputs = nn.functional.linear(inputs, cell.weight_ih, cell.bias_ih)
    torch.testing.assert_close(gates(from_inputs, state), cell(inputs, state))


def test_attention_is_the_papers_equation() -> None:
    torch.manual_seed(3)
    attention = AdditiveAttention(4, 6, 5)
    state, annotations = torch.randn(1, 1, 4), torch.randn(1, 3, 6)
    scores = torch.stack(
        [
            attention.score.weight[0] @ torch.tanh(attention.query(state[0, 0]) + attention.key(annotation))
            for annotation in annotations[0]
        ]
    )
    context, weights = attention(state, attention.keys(annotations), annotations, torch.ones(1, 3))
    torch.testing.assert_close(weights[0, 0], scores.softmax(0))
    torch.testing.assert_close(context[0, 0], scores.softmax(0) @ annotations[0])


def test_the_recurrence_reads_each_row_to_its_end_and_back() -> None:
    torch.manual_seed(4)
    gru = nn.GRU(5, 6, batch_first=True, bidirectional=True)
    inputs, mask = torch.randn(2, 7, 5), (torch.arange(7) < torch.tensor([[7], [3]])).long()
    states, last = recur_packed(gru, inputs, mask)
    for row, length in ((0, 7), (1, 3)):
        alone, last_alone = gru(inputs[row : row + 1, :length])
        torch.testing.assert_close(states[row, :length], alone[0])
        torch.testing.assert_close(last[:, row], last_alone[:, 0])
        assert not states[row, length:].any()


@torch.inference_mode()
def test_greedy_translations_are_the_same_alone_and_among_others(model, batch) -> None:
    source, mask, _ = batch
    together = translate_greedily(model, source, mask, bos=1, eos=2)
    assert all(len(row) <= 16 for row in together)
    for row, length in enumerate(mask.sum(1).tolist()):
        alone = translate_greedily(model, source[row : row + 1, :length], mask[row : row + 1, :length], bos=1, eos=2)
        assert alone == together[row : row + 1]


def test_every_weight_learns(batch) -> None:
    torch.manual_seed(5)
    model = build_model("recurrent", {**FIELDS, "tie_embeddings": False, "dropout": 0.1})
    model(*batch).square().mean().backward()
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in model.parameters())


def test_sentences_past_the_limits_are_refused(model) -> None:
    short = torch.ones(1, 2, dtype=torch.int64)
    with pytest.raises(ValueError, match="a source sentence may have at most 20 tokens, and has 21"):
        model(torch.ones(1, 21, dtype=torch.int64), torch.ones(1, 21), short)
    with pytest.raises(ValueError, match="a target sentence may have at most 16 tokens, and has 17"):
        model(short, short, torch.ones(1, 17, dtype=torch.int64))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"d_state": 0}, "d_state must be an integer of at least 1, and is 0"),
        ({"dropout": 1.0}, "dropout must be at least 0 and below 1, and is 1.0"),
        ({"tie_embeddings": 1}, "tie_embeddings must be true or false, and is 1"),
    ],
)
def test_a_wrong_field_is_named_with_its_limit(change, message) -> None:
    with pytest.raises(ValueError, match=message):
        RecurrentConfig(**{**FIELDS, **change})


def test_the_recipes_configuration_has_five_million_parameters() -> None:
    named = named_configuration("multi30k-recurrent")
    assert 5_000_000 < count_parameters(build_model(named.architecture, named.configuration)) < 6_000_000
