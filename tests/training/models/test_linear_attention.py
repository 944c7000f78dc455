"""Linear attention computes the same token by token, block by block and over a whole text."""

import pytest
import torch

from headway_training.models import LinearDecoder, build_model
from headway_training.models.parts.linear_attention import attend_block, attend_blocks

FIELDS = {
    "vocabulary_size": 40,
    "max_length": 64,
    "num_layers": 2,
    "d_model": 32,
    "num_heads": 2,
    "d_ff": 48,
}


@pytest.fixture
def inputs():
    """Query, key, value, logarithms of decays, and a memory: float64 would not be read in fp32, so these are fp32."""
    generator = torch.Generator().manual_seed(3)
    query, key, value = (torch.randn(2, 29, 3, 8, generator=generator) for _ in range(3))
    log_decay = -torch.rand(2, 29, 3, generator=generator)
    return query, key, value, log_decay, torch.randn(2, 3, 8, 8, generator=generator)


def by_the_recurrence(query, key, value, log_decay, memory):
    """The two equations at the head of the module, one token and one head after another, in float64."""
    rows, length, heads, width = query.shape
    context = torch.zeros(rows, length, heads, width, dtype=torch.float64)
    after = memory.double().clone()
    for row in range(rows):
        for head in range(heads):
            for token in range(length):
                decay = log_decay[row, token, head].double().exp()
                added = torch.outer(key[row, token, head].double(), value[row, token, head].double())
                after[row, head] = decay * after[row, head] + added
                context[row, token, head] = query[row, token, head].double() @ after[row, head] / width**0.5
    return context, after


def test_a_block_computes_the_recurrence(inputs):
    context, memory = attend_block(*inputs)
    expected, after = by_the_recurrence(*inputs)
    torch.testing.assert_close(context.double(), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(memory.double(), after, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("block", [1, 4, 7, 29, 64])
def test_blocks_of_any_length_compute_the_same(inputs, block):
    expected, after = attend_block(*inputs)
    context, memory = attend_blocks(*inputs, block=block)
    torch.testing.assert_close(context, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(memory, after, rtol=1e-4, atol=1e-5)


def test_memory_is_forgotten_without_a_number_that_is_none(inputs):
    query, key, value, log_decay, memory = inputs
    query, key, value, memory = (tensor.requires_grad_() for tensor in (query, key, value, memory))
    context, after = attend_block(query, key, value, torch.full_like(log_decay, -80.0), memory)
    torch.testing.assert_close(context, (query * key).sum(-1, keepdim=True) / 8**0.5 * value)
    (context.sum() + after.sum()).backward()
    assert all(tensor.grad.isfinite().all() for tensor in (query, key, value, memory))


@pytest.fixture
def model():
    torch.manual_seed(5)
    model = build_model("linear", FIELDS).eval()
    assert isinstance(model, LinearDecoder)
    with torch.no_grad():  # fresh ones are zeros, and everything is near to zero beside the embedding
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


@pytest.mark.parametrize("cuts", [(1,) * 20, (5, 1, 1, 7, 6), (19, 1)])
def test_a_text_may_be_read_in_any_pieces(model, cuts):
    ids = torch.randint(40, (3, sum(cuts)), generator=torch.Generator().manual_seed(1))
    whole = model(ids)
    states, pieces = model.first_states(3), []
    with torch.inference_mode():
        for piece in torch.split(ids, cuts, dim=1):
            hidden, states = model.read(piece, states)
            pieces.append(model.logits(hidden))
    torch.testing.assert_close(torch.cat(pieces, dim=1), whole, rtol=1e-4, atol=1e-4)


def test_no_token_sees_a_later_one(model):
    ids = torch.randint(40, (1, 20), generator=torch.Generator().manual_seed(2))
    other = ids.clone()
    other[:, 12:] = (other[:, 12:] + 1) % 40
    assert torch.equal(model(ids)[:, :12], model(other)[:, :12])
    assert not torch.allclose(model(ids)[:, 12], model(other)[:, 12])


def test_the_state_of_a_row_does_not_grow(model):
    states = model.first_states(2)
    for length in (1, 30, 3):
        _, states = model.read(torch.zeros(2, length, dtype=torch.int64), states)
        assert [tuple(state.shape[1:]) for state in states] == model.state_shapes


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("positions", "rotary", "positions must be 'none'"),
        ("num_kv_heads", 1, "num_kv_heads must be 0"),
        ("window", 65, "window must be at most max_length"),
    ],
)
def test_what_belongs_to_other_attention_is_refused(field, value, message):
    with pytest.raises(ValueError, match=message):
        build_model("linear", {**FIELDS, field: value})
