"""The ranges of what a translation call may ask for, and what does not go together."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy_decoder import NumpyEncoder
from tiny_engine import EOS_ID, VOCAB_SIZE, make_decoder, make_translation_model

from headway_server.decoding.parameters import MAX_BEAMS, EarlyStopping
from headway_server.errors import InvalidInputError
from headway_server.tasks.parameters import DecodingLimits
from headway_server.tasks.text_to_text.phrases import PhraseRequest
from headway_server.tasks.text_to_text.request import (
    TextToTextParameters,
    TextToTextRequest,
    plan_text_to_text,
)

LIMITS = DecodingLimits(max_input_tokens=40, max_total_tokens=64, vocab_size=VOCAB_SIZE)


def plan(*, is_stream=False, num_slots=8, num_texts=1, **wishes):
    parameters = TextToTextParameters(**wishes.pop("parameters", {}))
    return plan_text_to_text(
        TextToTextRequest(parameters=parameters, **wishes),
        num_texts=num_texts,
        limits=LIMITS,
        num_slots=num_slots,
        owner="tiny",
        is_stream=is_stream,
    )


WRONG = [
    ("max_new_tokens", 0, "max_new_tokens", "is 0; must be from 1 to 64"),
    ("max_new_tokens", 65, "max_new_tokens", "is 65; must be from 1 to 64"),
    ("min_new_tokens", 65, "min_new_tokens", "is 65; must be from 0 to 64"),
    ("max_length_ratio", 0.0, "max_length_ratio", "is 0; must be above 0 and at most 100"),
    ("max_length_ratio", 101.0, "max_length_ratio", "is 101; must be above 0 and at most 100"),
    ("max_length_ratio", math.nan, "max_length_ratio", "is nan"),
    ("beam_size", 0, "beam_size", "is 0; must be from 1 to 16"),
    ("beam_size", 17, "beam_size", "is 17; must be from 1 to 16"),
    ("beam_size", 9, "beam_size", "at most 8, or start the server with --num-slots 9"),
    ("num_hypotheses", 2, "hypothesis_count", "is 2; must be from 1 to 1"),
    ("num_hypotheses", 0, "hypothesis_count", "is 0; must be from 1 to 1"),
    ("length_penalty", -0.5, "length_penalty", "is -0.5; must be from 0 to 5"),
    ("length_penalty", math.inf, "length_penalty", "is inf; must be from 0 to 5"),
    ("no_repeat_ngram_size", 17, "no_repeat_ngram_size", "is 17; must be from 0 to 16"),
    ("no_repeat_ngram_size", -1, "no_repeat_ngram_size", "is -1; must be from 0 to 16"),
    ("sampling", {"temperature": 2.5}, "sampling.temperature", "is 2.5; must be from 0 to 2"),
    ("sampling", {"top_k": -1}, "sampling.top_k", f"is -1; must be from 0 to {VOCAB_SIZE}"),
    ("sampling", {"top_p": 1.5}, "sampling.top_p", "is 1.5; must be above 0 and at most 1"),
    ("sampling", {"min_p": math.nan}, "sampling.min_p", "is nan; must be from 0 to 1"),
]


@pytest.mark.parametrize(("name", "value", "field", "says"), WRONG)
def test_a_parameter_past_its_range_is_named_with_limit_and_value(name, value, field, says):
    with pytest.raises(InvalidInputError) as caught:
        plan(parameters={name: value})
    assert caught.value.field == f"parameters.{field}"
    assert says in caught.value.description


def test_what_an_answer_with_alignments_holds_is_bounded():
    many = {"parameters": {"beam_size": 5, "num_hypotheses": 5}, "num_texts": 205}
    with pytest.raises(
        InvalidInputError, match="is 5 for 205 texts; with alignment a call answers at most 1024"
    ) as caught:
        plan(wants_alignment=True, **many)
    assert caught.value.field == "parameters.hypothesis_count"
    assert plan(**many).num_hypotheses == 5
    assert plan(wants_alignment=True, **(many | {"num_texts": 204})).num_hypotheses == 5


SAMPLING = {"sampling": {"temperature": 1.0}}
PHRASES = (PhraseRequest(required=("cat",)),)


@pytest.mark.parametrize(
    ("wishes", "field"),
    [
        ({"parameters": {"beam_size": 2, **SAMPLING}}, "parameters.beam_size"),
        ({"parameters": SAMPLING, "phrases": PHRASES}, "phrase_constraints"),
        ({"parameters": {"beam_size": 2}, "is_stream": True}, "parameters.beam_size"),
        ({"split_sentences": True, "phrases": PHRASES}, "phrase_constraints"),
        ({"split_sentences": True, "target_prefixes": ("the",)}, "target_prefixes"),
        (
            {"split_sentences": True, "parameters": {"beam_size": 2, "num_hypotheses": 2}},
            "parameters.hypothesis_count",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(wishes, field):
    with pytest.raises(InvalidInputError) as caught:
        plan(**wishes)
    assert caught.value.field == field


WITHIN = {
    "max_new_tokens": st.none() | st.integers(1, 64),
    "max_length_ratio": st.none() | st.floats(0.001, 100),
    "beam_size": st.integers(1, MAX_BEAMS),
    "length_penalty": st.floats(0, 5),
    "early_stopping": st.sampled_from(EarlyStopping),
    "no_repeat_ngram_size": st.integers(0, 16),
}


@given(parameters=st.fixed_dictionaries(WITHIN), num_source_tokens=st.integers(1, 40), data=st.data())
def test_whatever_is_within_its_range_is_taken_as_it_is(parameters, num_source_tokens, data):
    parameters["num_hypotheses"] = data.draw(st.integers(1, parameters["beam_size"]))
    made = plan(num_slots=MAX_BEAMS, parameters=parameters)
    for name in ("beam_size", "num_hypotheses", "length_penalty", "early_stopping", "no_repeat_ngram_size"):
        assert getattr(made.search, name) == parameters[name]
    most, ratio = made.max_tokens(num_source_tokens), parameters["max_length_ratio"]
    assert 1 <= most <= (parameters["max_new_tokens"] or 64)
    assert ratio is None or most == 1 or most - 1 < ratio * num_source_tokens


async def test_a_length_ratio_counts_the_tokens_of_the_source_once():
    decoder = make_decoder(likely_id=None, max_length=128)
    decoder.output[:, EOS_ID] = 0  # greedy output never ends: some logit is always above 0
    model = make_translation_model(decoder, NumpyEncoder(vocab_size=VOCAB_SIZE))
    model.start()
    text = "!" * 39  # 40 tokens with the end of the sentence
    for ratio, expected in ((0.5, 20), (2.0, 80)):
        request = TextToTextRequest(parameters=TextToTextParameters(max_length_ratio=ratio))
        answer = await model.write([text], request=request)
        (result,) = answer.results
        assert (result.num_source_tokens, result.num_new_tokens) == (40, expected)
    model.close()
