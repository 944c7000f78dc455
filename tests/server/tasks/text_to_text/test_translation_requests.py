"""What a translation call may ask for, over the tiny decoder: beginnings, phrases, sentences, alignments."""

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy_decoder import NumpyEncoder
from tiny_engine import (
    EOS_ID,
    MAX_LENGTH,
    TOKENIZER,
    VOCAB_SIZE,
    byte_tokenizer,
    make_bundle,
    make_decoder,
    make_translation_model,
)

from headway_server.bundles import Task
from headway_server.decoding.sequence import Delta, FinishReason
from headway_server.errors import InvalidInputError, NoAlignmentError, OverloadedError
from headway_server.preprocessing import TextTokenizer, split_sentences
from headway_server.serving.answers import Answer
from headway_server.tasks.parameters import DecodingLimits
from headway_server.tasks.text_to_text.phrases import PhraseEncoder, PhraseRequest
from headway_server.tasks.text_to_text.request import TextToTextParameters, TextToTextRequest

PHRASE_ENCODER = PhraseEncoder(TextTokenizer(byte_tokenizer()), unknown_id=None, owner="tiny")
LIMITS = DecodingLimits(max_input_tokens=40, max_total_tokens=64, vocab_size=VOCAB_SIZE)
TEXTS = ["the cat sat", "the dog", "on the mat and the cat"]


def bundle_with_attention():
    """A bundle that says that its decoder gives its attention; the graphs are NumPy's in any case."""
    bundle = make_bundle(Task.TRANSLATION)
    variants = {
        precision: variant.model_copy(update={"alignment_layer": 0})
        for precision, variant in bundle.manifest.variants.items()
    }
    return replace(bundle, manifest=bundle.manifest.model_copy(update={"variants": variants}))


@pytest.fixture
async def model():
    encoder = NumpyEncoder(vocab_size=VOCAB_SIZE)
    made = make_translation_model(make_decoder(num_slots=8), encoder, bundle=bundle_with_attention())
    made.start()
    yield made
    made.close()
    assert made._admission._num_admitted == 0


async def translate(model, *texts, **wishes):
    parameters = TextToTextParameters(**({"max_new_tokens": 16} | wishes.pop("parameters", {})))
    request = TextToTextRequest(parameters=parameters, **wishes)
    return (await model.write(texts, request=request)).results


async def stream(model, text, **wishes):
    parameters = TextToTextParameters(**({"max_new_tokens": 16} | wishes.pop("parameters", {})))
    request = TextToTextRequest(parameters=parameters, **wishes)
    parts = [part async for part in model.stream(text, field="text", request=request)]
    assert all(isinstance(part, Delta) for part in parts[:-1])
    assert isinstance(parts[-1], Answer)
    return parts[:-1], parts[-1].results[0]


async def test_the_smaller_limit_of_length_holds(model):
    for text in TEXTS:
        num_source_tokens = len(TOKENIZER.encode(text).ids)
        (short,) = await translate(model, text, parameters={"max_length_ratio": 0.4})
        assert short.num_new_tokens <= math.ceil(0.4 * num_source_tokens)
        (long,) = await translate(model, text, parameters={"max_length_ratio": 100.0, "max_new_tokens": 5})
        assert long.num_new_tokens <= 5


@pytest.mark.parametrize("beam_size", [1, 3])
async def test_a_translation_begins_with_its_prefix(model, beam_size):
    prefixes = ("the mat", "", "  é and ")
    plain = await translate(model, *TEXTS, parameters={"beam_size": beam_size})
    begun = await translate(model, *TEXTS, target_prefixes=prefixes, parameters={"beam_size": beam_size})
    for prefix, result in zip(prefixes, begun, strict=True):
        assert result.text.startswith(prefix.rstrip())
        assert result.num_new_tokens > len(TOKENIZER.encode(prefix.rstrip(), add_special_tokens=False).ids)
        assert result.num_new_tokens <= 16
    assert begun[1] == plain[1]
    assert begun[0] != plain[0]


async def test_a_stream_has_its_prefix_in_the_first_delta_and_equals_the_unary_answer(model):
    (expected,) = await translate(model, "the cat", target_prefixes=("the dog sat",))
    deltas, result = await stream(model, "the cat", target_prefixes=("the dog sat",))
    assert deltas[0].output.startswith("the dog sat")
    assert result == expected
    assert "".join(delta.output for delta in deltas) == result.text


async def test_a_prefix_that_leaves_no_room_is_refused(model):
    with pytest.raises(InvalidInputError, match=r"target_prefixes\[1\]: has 16 tokens; must have at most 15"):
        await translate(model, "a", "b", target_prefixes=("", "!" * 16))
    with pytest.raises(InvalidInputError, match=r"^target_prefix: has 16 tokens"):
        await stream(model, "a", target_prefixes=("!" * 16,))
    (fits,) = await translate(model, "a", target_prefixes=("!" * 15,))
    assert fits.text.startswith("!" * 15)


@pytest.mark.parametrize("parameters", [{}, {"beam_size": 4}, {"sampling": {"temperature": 2.0, "seed": 3}}])
async def test_no_tokens_follow_each_other_twice_where_that_is_asked_for(model, parameters):
    model_parameters = {"max_new_tokens": 40, "no_repeat_ngram_size": 1, **parameters}
    decoder_output = model._lanes._engines[0]._stepper._decoder.output
    decoder_output[:, EOS_ID] = 0  # goes on for long
    results = await translate(model, *TEXTS, parameters=model_parameters, wants_alignment=True)
    for result in results:
        assert result.num_new_tokens > 20
        deltas = [result.text[start:end] for start, end in result.alignments[0].target_spans]
        assert len(deltas) >= 20
    free = await translate(model, *TEXTS, parameters={**model_parameters, "no_repeat_ngram_size": 0})
    assert [result.text for result in free] != [result.text for result in results]


async def test_a_seed_gives_the_same_translation_and_is_answered(model):
    sampling = {"temperature": 1.5, "top_k": 50, "top_p": 0.9, "min_p": 0.01}
    first, second = await translate(model, "the cat", "the cat", parameters={"sampling": sampling})
    assert first.seed != second.seed
    again = sampling | {"seed": first.seed}
    (repeated,) = await translate(model, "the cat", parameters={"sampling": again})
    assert repeated == first
    _, streamed = await stream(model, "the cat", parameters={"sampling": again})
    assert streamed == first
    (greedy,) = await translate(model, "the cat")
    assert greedy.seed is None


async def test_hypotheses_come_best_first_with_their_scores(model):
    (result,) = await translate(
        model, "the cat", parameters={"beam_size": 4, "num_hypotheses": 3, "length_penalty": 0.7}
    )
    assert len(result.hypotheses) == 3
    scores = [hypothesis.score for hypothesis in result.hypotheses]
    assert scores == sorted(scores, reverse=True)
    for hypothesis in result.hypotheses:
        assert hypothesis.score == pytest.approx(hypothesis.log_probability / hypothesis.num_new_tokens**0.7)
    best = result.hypotheses[0]
    assert (result.text, result.score, result.num_new_tokens) == (best.text, best.score, best.num_new_tokens)
    (alone,) = await translate(model, "the cat", parameters={"beam_size": 4, "length_penalty": 0.7})
    assert alone.hypotheses == ()
    assert alone.text == result.text


async def test_required_phrases_appear_and_forbidden_ones_do_not(model):
    parameters = {"beam_size": 4, "num_hypotheses": 4, "max_new_tokens": 30}
    required = PhraseRequest(required=("the dog", "mat"))
    (result,) = await translate(model, "the cat", phrases=(required,), parameters=parameters)
    for hypothesis in result.hypotheses:
        assert "the dog" in hypothesis.text
        assert "mat" in hypothesis.text
        assert not hypothesis.text.startswith(" ")
    (plain,) = await translate(model, "the cat", parameters=parameters)
    forbidden = tuple(character for character in dict.fromkeys(plain.text) if character.isalnum())
    assert forbidden
    (result,) = await translate(model, "the cat", phrases=(PhraseRequest(forbidden=forbidden),), parameters=parameters)
    assert result.text != plain.text
    assert not any(character in result.text for character in forbidden)


async def test_a_forbidden_phrase_is_not_spelled_in_another_way(model):
    parameters = {"beam_size": 2, "max_new_tokens": 20}
    letters = TOKENIZER.encode("t").ids[0], TOKENIZER.token_to_id("h"), TOKENIZER.token_to_id("e")
    encoded = model._phrases.encode_phrases("phrases", PhraseRequest(forbidden=("the",)))
    assert letters not in encoded.forbidden
    assert model._phrases.spellings(encoded, "the.", [*letters, TOKENIZER.token_to_id(".")]) == (letters,)
    assert model._phrases.spellings(encoded, "then", [*letters, TOKENIZER.token_to_id("n")]) == ()
    (result,) = await translate(model, "the cat", phrases=(PhraseRequest(forbidden=("the",)),), parameters=parameters)
    assert "the" not in result.text.split()


@pytest.mark.parametrize(
    ("phrases", "field", "says"),
    [
        (PhraseRequest(required=(" ",)), "required[0]", "is empty"),
        (PhraseRequest(forbidden=("cat", "")), "forbidden[1]", "is empty"),
        (PhraseRequest(required=("x",) * 17), "required", "has 17 elements; at most 16"),
        (PhraseRequest(forbidden=("x",) * 65), "forbidden", "has 65 elements; at most 64"),
        (PhraseRequest(required=("dog", "cat"), forbidden=("cat ",)), "required[1]", "forbidden[0] is the same"),
        (PhraseRequest(required=("the cat sat",), forbidden=("cat",)), "required[0]", "forbidden[0] is a part of it"),
        (PhraseRequest(required=("!" * 17,)), "required", "has 17 tokens with the target prefix"),
    ],
)
async def test_phrases_that_cannot_be_are_refused_by_name(model, phrases, field, says):
    with pytest.raises(InvalidInputError) as caught:
        await translate(model, "a", "b", phrases=(PhraseRequest(), phrases))
    assert caught.value.field == f"phrase_constraints[1].{field}"
    assert says in caught.value.description


async def test_a_prefix_that_says_what_must_not_be_said_is_refused(model):
    with pytest.raises(InvalidInputError) as caught:
        await translate(model, "a", target_prefixes=("the cat",), phrases=(PhraseRequest(forbidden=("dog", "cat")),))
    assert caught.value.field == "phrase_constraints[0].forbidden[1]"


@pytest.mark.parametrize("parameters", [{}, {"beam_size": 2}, {"sampling": {"temperature": 1.0, "seed": 1}}])
async def test_sentences_are_translated_by_themselves_and_joined_with_the_spacing_of_the_text(model, parameters):
    text = "\n the cat sat. the dog!\n\n- on the mat "
    (whole, other) = await translate(model, text, "the cat", split_sentences=True, parameters=parameters)
    split = split_sentences(text, "en")
    assert whole.num_sentences == len(split.sentences) == 3
    assert other.num_sentences == 1
    if "sampling" not in parameters:
        alone = await translate(model, *(sentence.text for sentence in split.sentences), parameters=parameters)
        assert whole.text == split.join([sentence.text for sentence in alone])[0]
        assert whole.log_probability == pytest.approx(sum(sentence.log_probability for sentence in alone))
        assert whole.score == pytest.approx(sum(sentence.score for sentence in alone))
        assert whole.num_new_tokens == sum(sentence.num_new_tokens for sentence in alone)
        assert whole.num_source_tokens == sum(sentence.num_source_tokens for sentence in alone)
        lengths = {sentence.finish_reason for sentence in alone}
        assert whole.finish_reason is (FinishReason.LENGTH if FinishReason.LENGTH in lengths else lengths.pop())
    else:
        assert whole.seed == other.seed == 1


async def test_a_sentence_past_the_limit_is_refused_by_number_and_place_or_cut(model):
    text = "the cat. " + "!" * 50
    with pytest.raises(InvalidInputError, match=r"^texts\[1\]: sentence 2 \(characters 9 to 59\) has 51 tokens"):
        await translate(model, "a", text, split_sentences=True)
    short, cut = await translate(model, "a", text, split_sentences=True, truncate=True)
    assert (short.truncated, cut.truncated) == (False, True)
    assert cut.num_source_tokens == len(TOKENIZER.encode("the cat.").ids) + 40
    with pytest.raises(InvalidInputError, match=r"texts\[0\]: has no text"):
        await translate(model, " \n ", split_sentences=True)


async def test_a_permit_is_taken_for_every_sentence():
    model = make_translation_model(make_decoder(num_slots=1), NumpyEncoder(vocab_size=VOCAB_SIZE), max_waiting=3)
    model.start()
    with pytest.raises(InvalidInputError, match="has 5 sentences; tiny-translation takes at most 4 at once"):
        await translate(model, "the cat. " * 5, split_sentences=True)
    with pytest.raises(InvalidInputError, match="has at least 5 sentences"):
        await translate(model, "the cat. " * 5, "the dog", split_sentences=True)
    with model._admission.admit(2), pytest.raises(OverloadedError):
        await translate(model, "the cat. " * 3, split_sentences=True)
    (result,) = await translate(model, "the cat. " * 4, split_sentences=True)
    assert result.num_sentences == 4
    assert model._admission._num_admitted == 0
    model.close()


@pytest.mark.parametrize("parameters", [{}, {"beam_size": 3, "num_hypotheses": 2}])
async def test_alignments_have_a_row_for_every_token_and_fit_both_texts(model, parameters):
    results = await translate(model, *TEXTS, wants_alignment=True, parameters=parameters)
    for text, result in zip(TEXTS, results, strict=True):
        (alignment,) = result.alignments
        assert alignment.attention.shape == (len(alignment.target_spans), result.num_source_tokens)
        assert alignment.attention.sum(axis=1) == pytest.approx(1.0)
        words = [text[start:end] for start, end in alignment.source_spans]
        assert "".join(words) == text.replace(" ", "")
        assert alignment.source_spans[-1] == (len(text), len(text))
        assert all(0 <= start <= end <= len(result.text) for start, end in alignment.target_spans)
        assert all(hypothesis.alignment is not None for hypothesis in result.hypotheses)
    plain = await translate(model, *TEXTS, parameters=parameters)
    assert [result.text for result in plain] == [result.text for result in results]
    assert all(not result.alignments for result in plain)


async def test_alignments_of_sentences_point_into_the_whole_texts(model):
    text = "the cat sat.  the dog on the mat."
    (result,) = await translate(model, text, wants_alignment=True, split_sentences=True)
    first, second = result.alignments
    assert text[slice(*second.source_spans[0])] == "the"
    assert second.source_spans[0][0] == 14
    assert first.target_spans[-1][1] <= second.target_spans[0][0]
    _, streamed = await stream(model, "the cat sat.", wants_alignment=True)
    assert streamed.alignments[0].target_spans == first.target_spans


@pytest.mark.parametrize("wishes", [{}, {"split_sentences": True}], ids=["whole", "sentences"])
async def test_white_space_alone_is_refused_and_not_translated(model, wishes):
    with pytest.raises(InvalidInputError, match="has no text") as caught:
        await translate(model, "the cat", " \n\u3000", **wishes)
    assert caught.value.field == "texts[1]"
    with pytest.raises(InvalidInputError, match="has no text"):
        await stream(model, "\t")


async def test_glossaries_of_many_texts_each_go_with_their_own(model):
    words = ["the cat", "the dog", "on the mat"]
    prefixes = tuple(words[number % 3] for number in range(9))
    results = await translate(model, *["the cat sat"] * 9, target_prefixes=prefixes)
    assert [result.text.startswith(prefix) for result, prefix in zip(results, prefixes, strict=True)] == [True] * 9
    with pytest.raises(InvalidInputError) as caught:
        await translate(model, *["the cat sat"] * 9, target_prefixes=(*prefixes[:7], "the " * 40, ""))
    assert caught.value.field == "target_prefixes[7]"


async def test_a_bundle_without_attention_refuses_alignments_and_says_what_to_do():
    model = make_translation_model(make_decoder(), NumpyEncoder(vocab_size=VOCAB_SIZE))
    with pytest.raises(NoAlignmentError, match=r"tiny-translation/1 .* export it again"):
        await translate(model, "the cat", wants_alignment=True)


@settings(max_examples=30)
@given(prefix=st.text(alphabet="the catsé€ .", max_size=12))
def test_prefixes_are_encoded_as_they_read(prefix):
    token_ids = PHRASE_ENCODER.encode_prefix("target_prefix", prefix, MAX_LENGTH)
    assert TOKENIZER.decode(list(token_ids)) == prefix.rstrip()
