"""What a translation request says, read field by field: what is set is taken, what is not takes its default."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.v1 import common_pb2
from headway.v1 import translation_service_pb2 as pb
from headway_server.decoding.parameters import EarlyStopping
from headway_server.errors import InvalidInputError
from headway_server.services.messages import as_unary
from headway_server.services.text_to_text_requests import parse_parameters, parse_request
from headway_server.tasks.text_to_text.phrases import PhraseRequest
from headway_server.tasks.text_to_text.request import TextToTextParameters, TextToTextRequest

INTEGERS = st.integers(-(2**31), 2**31 - 1)
FLOATS = st.floats(width=32, allow_nan=False)
PARAMETERS = {
    "max_new_tokens": ("max_new_tokens", INTEGERS),
    "min_new_tokens": ("min_new_tokens", INTEGERS),
    "max_length_ratio": ("max_length_ratio", FLOATS),
    "beam_size": ("beam_size", INTEGERS),
    "hypothesis_count": ("num_hypotheses", INTEGERS),
    "length_penalty": ("length_penalty", FLOATS),
    "no_repeat_ngram_size": ("no_repeat_ngram_size", INTEGERS),
}
SAMPLING = {
    "temperature": ("temperature", FLOATS),
    "top_k": ("top_k", INTEGERS),
    "top_p": ("top_p", FLOATS),
    "min_p": ("min_p", FLOATS),
    "seed": ("seed", st.integers(0, 2**64 - 1)),
}


def some_of(fields):
    return st.fixed_dictionaries({}, optional={name: values for name, (_, values) in fields.items()})


@given(given_=some_of(PARAMETERS))
def test_parameters_that_are_set_are_taken_and_the_others_are_the_defaults(given_):
    parsed = parse_parameters(common_pb2.DecodingParameters(**given_))
    assert parsed == TextToTextParameters(**{PARAMETERS[name][0]: value for name, value in given_.items()})


@given(given_=some_of(SAMPLING))
def test_sampling_is_read_as_it_is_set(given_):
    parsed = parse_parameters(common_pb2.DecodingParameters(sampling=common_pb2.SamplingParameters(**given_)))
    assert parsed.sampling == given_


@pytest.mark.parametrize("number", range(4))
def test_ways_of_stopping(number):
    expected = {0: EarlyStopping.HEURISTIC, 1: EarlyStopping.FIRST, 2: EarlyStopping.HEURISTIC, 3: EarlyStopping.NEVER}
    assert parse_parameters(common_pb2.DecodingParameters(early_stopping=number)).early_stopping is expected[number]


def test_an_unknown_way_of_stopping_is_refused():
    with pytest.raises(InvalidInputError, match="is 4; must be one of EARLY_STOPPING_FIRST"):
        parse_parameters(common_pb2.DecodingParameters(early_stopping=4))


def test_what_is_said_of_each_text_is_read_in_order():
    request = pb.TranslateTextRequest(
        texts=["a", "b"],
        target_prefixes=["x", ""],
        phrase_constraints=[
            common_pb2.PhraseConstraints(),
            common_pb2.PhraseConstraints(required=["y"], forbidden=["z", "z"]),
        ],
        truncate=True,
        include_alignment=True,
        split_sentences=True,
    )
    assert parse_request(request, deadline=5.0) == TextToTextRequest(
        truncate=True,
        target_prefixes=("x", ""),
        phrases=(PhraseRequest(), PhraseRequest(required=("y",), forbidden=("z", "z"))),
        wants_alignment=True,
        split_sentences=True,
        deadline=5.0,
    )
    stream = pb.StreamTranslateTextRequest(text="a", target_prefix="x", include_alignment=True)
    assert parse_request(as_unary(stream, pb.TranslateTextRequest), deadline=None) == TextToTextRequest(
        target_prefixes=("x",), wants_alignment=True
    )
