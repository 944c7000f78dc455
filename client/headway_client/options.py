"""Keyword arguments of the calls, the same for both clients; what is not given takes the server's default."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from headway_client.translation_results import EarlyStopping, PhraseConstraints


class ModelOptions(TypedDict, total=False):
    """Which model answers."""

    model: str
    """Name of the model. Default: the server's only model for the task."""
    model_version: str
    """Version of the model. Default: the latest one loaded."""


class TextOptions(ModelOptions, total=False):
    """Options of every call that reads text."""

    truncate: bool
    """Shorten a text that is past the model's limit instead of refusing it. Default: False."""


class SamplingOptions(TypedDict, total=False):
    """How to choose tokens; what is not given takes the model's own default."""

    max_new_tokens: int | None
    """Most tokens to produce, from 1 to the room the model has left."""
    min_new_tokens: int | None
    """Tokens to produce before the text may end, from 0 to `max_new_tokens`."""
    temperature: float | None
    """Softmax temperature, 0 to 2; 0 is greedy decoding."""
    top_k: int | None
    """Sample among the k most likely tokens; 0 turns it off."""
    top_p: float | None
    """Sample among the smallest set of tokens whose probability reaches p, above 0 to 1."""
    min_p: float | None
    """Leave out tokens less likely than this share of the likeliest one's probability, 0 to 1; 0 turns it off."""
    repetition_penalty: float | None
    """Makes tokens that are in the prompt or the text less likely above 1, more likely below it, 0.01 to 100."""
    presence_penalty: float | None
    """Subtracted from the logit of every token that is in the text, -2 to 2."""
    frequency_penalty: float | None
    """Subtracted from the logit of a token once for every time it is in the text, -2 to 2."""
    logit_bias: Mapping[int, float] | None
    """Added to the logits of tokens, -100 to 100 by token id; at most 1024."""
    seed: int | None
    """Seed of the random stream: a seed gives the same text whatever else runs."""
    stop: Sequence[str]
    """Strings that end the text; they are not part of it. At most 16."""
    stop_token_ids: Sequence[int]
    """Tokens that end the text; they are not part of it. At most 64."""
    json_schema: str | Mapping[str, Any] | None
    """A JSON Schema that the text is a value of, as JSON text or as what `json.dumps` makes that of."""
    regex: str | None
    """A regular expression that the whole text matches. Only one of `json_schema`, `regex` and `choices` can be set."""
    choices: Sequence[str] | None
    """Texts of which the text is one. At most 256."""


class StreamGenerateOptions(TextOptions, SamplingOptions, total=False):
    """Options of streamed text generation."""

    echo: bool
    """Repeat the prompt at the beginning of the text. Default: False."""
    log_probabilities: int | None
    """Answer the log-probability of every token, and so many of the likeliest at its place, 0 to 20. Default: none."""
    prompt_log_probabilities: bool
    """Answer those of the prompt's tokens too. Default: False."""
    priority: int
    """Place in the queue, -100 to 100: a higher one goes first. Default: 0."""


class GenerateOptions(StreamGenerateOptions, total=False):
    """Options of text generation."""

    samples: int | None
    """Texts to answer for every prompt, one after the other, 1 to 16. Default: 1."""


class TranslationDecodingOptions(TypedDict, total=False):
    """How to decode a translation, in streams too."""

    max_new_tokens: int | None
    """Most tokens of a translation, 1 to the model's maximum."""
    max_length_ratio: float | None
    """Most tokens of a translation for each token of its source, above 0 to 100; the smaller of both limits holds."""
    length_penalty: float | None
    """A score is the log-probability divided by the token count to this power, 0 to 5. Default: 1."""
    no_repeat_ngram_size: int | None
    """So many tokens may not follow each other twice, 0 to 16; 0, the default, allows it."""
    sample: bool
    """Draw tokens at random instead of searching; so does each of the five below. Default: False."""
    temperature: float | None
    """Softmax temperature, above 0 to 2. Default: 1."""
    top_k: int | None
    """Draw among the k likeliest tokens; 0, the default, is all."""
    top_p: float | None
    """Draw among the smallest set of tokens whose probability reaches p, above 0 to 1. Default: 1."""
    min_p: float | None
    """Leave out tokens less likely than this share of the likeliest one's probability, 0 to 1. Default: 0."""
    seed: int | None
    """Seed of the random stream. Default: drawn for every text, and answered."""


class SharedTranslateOptions(TextOptions, TranslationDecodingOptions, total=False):
    """Options of translation, in streams too."""

    source_language: str
    """Language of the texts as a BCP 47 code. Default: the model's."""
    target_language: str
    """Language to translate to as a BCP 47 code. Default: the model's."""
    alignment: bool
    """Answer which words became which. Default: False."""


class StreamTranslateOptions(SharedTranslateOptions, total=False):
    """Options of streamed translation."""

    target_prefix: str
    """What the translation begins with. Default: nothing."""


class TranslateOptions(SharedTranslateOptions, total=False):
    """Options of translation."""

    target_prefix: str | Sequence[str]
    """What translations begin with: one for all of them, or one for every text. Default: nothing."""
    phrases: PhraseConstraints | Sequence[PhraseConstraints]
    """Phrases that must or must not appear: for all translations, or for each one."""
    split_sentences: bool
    """Translate the sentences of a text by themselves and join them with its spacing. Default: False."""
    beam_size: int | None
    """Beams of the search, 1 to 16. Default: 1, which follows the likeliest token."""
    hypotheses: int | None
    """Translations to answer of each text, 1 to `beam_size`. Default: 1."""
    early_stopping: EarlyStopping | str | None
    """When the search ends: "first", "heuristic" (the default) or "never"."""


class ClassifyOptions(TextOptions, total=False):
    """Options of text classification."""

    top_k: int
    """Labels to answer a text, the most likely first; 0, the default, is all of them."""
    text_pairs: str | Sequence[str] | None
    """What each text is paired with, for models that read pairs: one for every text. Default: nothing."""
    threshold: float | None
    """Probability from which a label applies, 0 to 1. Default: the model's own of each label."""


class EmbedOptions(TextOptions, total=False):
    """Options of text embeddings."""

    text_pairs: str | Sequence[str] | None
    """What each text is paired with, for models that read pairs: one for every text. Default: nothing."""
    normalize: bool
    """Scale vectors to length 1, so that the product of two is the cosine of their angle. Default: True."""


class EmbedImageOptions(ModelOptions, total=False):
    """Options of image embeddings."""

    normalize: bool
    """Scale vectors to length 1, so that the product of two is the cosine of their angle. Default: True."""


class LabelOptions(ModelOptions, total=False):
    """Options of image labels."""

    top_k: int
    """Labels to answer an image, the most likely first; 0, the default, is all of them."""
