"""Models of many languages: which tokens tell them, what is asked for, and how scores count what is given."""

from dataclasses import replace

import pytest
from numpy_decoder import NumpyEncoder
from pydantic import ValidationError
from tiny_engine import MAX_LENGTH, TOKENIZER, VOCAB_SIZE, make_bundle, make_decoder, make_translation_model

from headway_server.bundles import Languages, Manifest, Task
from headway_server.errors import InvalidInputError
from headway_server.tasks.text_to_text.request import TextToTextParameters, TextToTextRequest

TOKENS = {"en": 5, "de-DE": 6, "zh-Hans": 7, "zh-Hant": 8}
MANY = Languages(source_tokens=TOKENS, target_tokens=TOKENS)
FIRST = {"source_language": "en", "target_language": "de"}


def make_model(languages):
    bundle = make_bundle(Task.TRANSLATION)
    bundle = replace(bundle, manifest=bundle.manifest.model_copy(update={"languages": languages}))
    return make_translation_model(make_decoder(num_slots=8), NumpyEncoder(vocab_size=VOCAB_SIZE), bundle=bundle)


@pytest.fixture
async def model():
    made = make_model(MANY)
    made.start()
    yield made
    made.close()


async def translate(model, text, *, max_new_tokens=12, **wishes):
    names = {"source_language", "target_language", "truncate"}
    parameters = {name: value for name, value in wishes.items() if name not in names}
    request = TextToTextRequest(
        parameters=TextToTextParameters(max_new_tokens=max_new_tokens, **parameters),
        **{name: value for name, value in wishes.items() if name in names},
    )
    return (await model.write([text], request=request)).results[0]


def test_a_language_is_found_whatever_its_case_and_separator_or_by_its_beginning():
    known = list(TOKENS)
    found = {code: Languages.match(code, known) for code in ("EN", "de_de", "de", "zh", "zh-hant", "e", "")}
    assert found == {
        "EN": "en", "de_de": "de-DE", "de": "de-DE", "zh": "zh-Hans", "zh-hant": "zh-Hant", "e": None, "": None,
    }  # fmt: skip
    assert Languages.match("", ["en"]) == "en"


def test_few_languages_are_all_named():
    assert str(Languages(target_tokens={"en": 5, "de": 6})) == "en, de"
    assert str(MANY) == "4 languages (en, de-DE, zh-Hans, ...) to 4 languages (en, de-DE, zh-Hans, ...)"


@pytest.mark.parametrize(
    "sides",
    [
        {"source": "en"},
        {"source": "en", "source_tokens": {"en": 1}, "target": "de"},
        {"target": "de", "target_marks": {"de": 1}},
    ],
)
def test_each_side_is_told_once(sides):
    with pytest.raises(ValidationError, match="is one language, or several with a token each"):
        Languages(**sides)


async def test_a_model_that_translates_tells_what_it_reads(model):
    fields = model.bundle.manifest.model_dump(exclude={"languages"})
    with pytest.raises(ValidationError, match="source is one language, or several with a token each; translation"):
        Manifest(**fields, languages=Languages(target="de"))


async def test_a_translation_depends_on_both_languages(model):
    text = "the cat sat on the mat"
    pairs = [("en", "de"), ("de", "en"), ("en", "zh-Hans"), ("zh-Hant", "de")]
    found = {pair: await translate(model, text, source_language=pair[0], target_language=pair[1]) for pair in pairs}
    assert len({result.text for result in found.values()}) == len(pairs)
    assert {result.num_source_tokens for result in found.values()} == {len(TOKENIZER.encode(text).ids) + 1}


async def test_languages_that_are_missing_or_unknown_are_named(model):
    for wishes, field, says in (
        (
            {"target_language": "en"},
            "source_language",
            "is empty; tiny-translation has 4 languages, name one: en,",
        ),
        ({"source_language": "en"}, "target_language", "is empty"),
        (FIRST | {"target_language": "fr"}, "target_language", "is 'fr'"),
    ):
        with pytest.raises(InvalidInputError) as caught:
            await translate(model, "the cat", **wishes)
        assert caught.value.field == field
        assert says in caught.value.description


async def test_the_token_of_a_language_takes_room_of_the_source_and_of_the_output(model):
    longest = model.limits.max_input_tokens
    text = " ".join(["a"] * 100)
    result = await translate(model, text, truncate=True, **FIRST)
    assert result.num_source_tokens == longest
    assert result.truncated
    with pytest.raises(InvalidInputError, match=f"is {MAX_LENGTH}; must be from 1 to {MAX_LENGTH - 1}"):
        await translate(model, "the cat", max_new_tokens=MAX_LENGTH, **FIRST)


@pytest.mark.parametrize("beam_size", [1, 3])
async def test_a_score_counts_the_token_that_is_given(model, beam_size):
    result = await translate(
        model, "the cat sat", beam_size=beam_size, num_hypotheses=beam_size, length_penalty=0.5, **FIRST
    )
    for one in result.hypotheses or (result,):
        assert one.score == pytest.approx(one.log_probability / (one.num_new_tokens + 1) ** 0.5)


async def test_a_target_that_is_told_before_the_source_needs_no_token_of_the_decoder():
    marked = make_model(Languages(source="en", target_marks={"de": 6, "fr": 7}))
    prefix, start = marked._start(TextToTextRequest(target_language="fr"))
    assert prefix == (7,)
    assert len(start) == 1
