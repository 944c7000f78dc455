"""Keyword arguments of the calls: each is named, typed and described here, once.

Both clients, `help()` and the command line take them from here. An option has the name of its field in the protocol.
None, like leaving an option out, leaves the choice to the server.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from typing import Annotated, Any, NamedTuple, TypedDict, TypeVar, get_args, get_type_hints

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])

Texts = str | Sequence[str]
"""One text or several."""


class EarlyStopping(StrEnum):
    """Stopping condition of a beam search with `beam_size` complete texts."""

    FIRST = "first"
    """At once."""
    HEURISTIC = "heuristic"
    """When the best open beam, if it ended now, would not score better than the worst complete text."""
    NEVER = "never"
    """When no continuation of an open beam can score better than the worst complete text."""


class AttentionSummary(StrEnum):
    """Summary of the heads of a layer."""

    MEAN = "mean"
    """A map for each layer: the mean over its heads."""
    MAXIMUM = "maximum"
    """A map for each layer: the largest weight of its heads."""
    ROLLOUT = "rollout"
    """One map for all layers: attention rollout (Abnar and Zuidema 2020)."""


class MaskFormat(StrEnum):
    """Format of a mask."""

    RUNS = "runs"
    """Lengths of runs by columns, as COCO has them."""
    PNG = "png"
    """A PNG of one bit a pixel."""


class DiffusionSampler(StrEnum):
    """Sampler of a diffusion model."""

    DDIM = "ddim"
    """DDIM, without noise in between."""
    DPM_SOLVER_PP_2M = "dpm_solver_pp_2m"
    """DPM-Solver++ of second order."""
    EULER = "euler"
    """Euler's method."""
    EULER_ANCESTRAL = "euler_ancestral"
    """Euler's method with new noise in each step; this and the following for published models."""
    DDPM = "ddpm"
    """DDPM, with new noise in each step."""
    PNDM = "pndm"
    """PNDM of linear multistep."""
    UNIPC = "unipc"
    """UniPC of second order."""
    LCM = "lcm"
    """Latent consistency models."""


@dataclass(frozen=True, slots=True)
class PhraseConstraints:
    """Phrases that must or must not appear in a translation or another new text, such as the terms of a glossary."""

    required: tuple[str, ...] = ()
    """Phrases that must appear, at most 16."""
    forbidden: tuple[str, ...] = ()
    """Phrases that must not appear, at most 64."""


@dataclass(frozen=True, slots=True)
class Page:
    """Words of a page and their boxes, such as an OCR system finds, for models that read boxes."""

    words: Sequence[str]
    """The words in reading order."""
    boxes: Sequence[Sequence[float]] | Sequence[float]
    """x_min, y_min, x_max and y_max of each word, from the upper left corner of the page; in fours or one after
    another."""
    width: float | None = None
    """Width of the page in the unit of the boxes; None, with `height`: boxes are in whole thousandths of the page."""
    height: float | None = None
    """Height of the page."""

    @property
    def text(self) -> str:
        """The words, with a space between two: the text that spans of a page are of."""
        return " ".join(self.words)


class ModelOptions(TypedDict, total=False):
    """Selection of the model."""

    model: Annotated[str | None, "Name of the model. Default: the only loaded model for the task."]
    model_version: Annotated[str | None, "Version of the model. Default: the latest loaded version."]


class SamplingOptions(TypedDict, total=False):
    """Token sampling."""

    temperature: Annotated[float | None, "Softmax temperature, 0 to 2; 0: greedy decoding."]
    top_k: Annotated[int | None, "Sample from the k most likely tokens; 0: from all."]
    top_p: Annotated[
        float | None, "Sample from the smallest set of tokens whose probabilities add up to p, above 0 to 1."
    ]
    min_p: Annotated[
        float | None, "Leave out tokens less likely than this fraction of the most likely token's probability, 0 to 1."
    ]
    seed: Annotated[int | None, "Seed of the random stream. Default: drawn by the server and returned."]


class ToolChoice(StrEnum):
    """Whether the model calls tools."""

    AUTO = "auto"
    """The model decides."""
    NONE = "none"
    """The model is not shown the tools."""
    REQUIRED = "required"
    """The answer is a call, or several."""


class Tool(NamedTuple):
    """A function that the model may call."""

    name: str
    """1 to 64 letters, digits, underscores and hyphens."""
    description: str = ""
    """Description for the model."""
    parameters: str | Mapping[str, Any] = ""
    """JSON Schema of its arguments, an object, as JSON text or as an object that json.dumps takes. Empty: none."""
    strict: bool = False
    """True refuses a schema with keywords that cannot be enforced; False leaves these keywords to the model."""


class StreamGenerateTextOptions(ModelOptions, SamplingOptions, total=False):
    """Options of StreamGenerateText. Options left out take the model's defaults."""

    max_new_tokens: Annotated[int | None, "Most tokens to generate. Default: the model's own, or its maximum."]
    min_new_tokens: Annotated[int | None, "Tokens to generate before the text may end, 0 to max_new_tokens."]
    thinking_token_budget: Annotated[
        int | None, "Limit of reasoning tokens before the answer; 0: no reasoning. Default: no limit."
    ]
    repetition_penalty: Annotated[
        float | None, "Above 1, tokens of the prompt and the text become less likely, 0.01 to 100; 1 turns it off."
    ]
    presence_penalty: Annotated[float | None, "Subtracted from the logits of tokens that are in the text, -2 to 2."]
    frequency_penalty: Annotated[
        float | None, "Subtracted from a token's logit once for each time it is in the text, -2 to 2."
    ]
    logit_biases: Annotated[Mapping[int, float] | None, "Added to the logits of tokens, by token id, -100 to 100."]
    stop_strings: Annotated[Texts | None, "Strings that end the text and are not part of it, at most 16."]
    stop_token_ids: Annotated[Sequence[int] | None, "Tokens that end the text and are not part of it, at most 64."]
    json_schema: Annotated[
        str | Mapping[str, Any] | None, "JSON Schema of the text, as JSON text or as an object that json.dumps takes."
    ]
    regex: Annotated[str | None, "Regular expression that the whole text matches."]
    choices: Annotated[Texts | None, "The text is one of these, at most 256."]
    truncate: Annotated[bool | None, "Cut the beginning off a prompt that is too long instead of refusing it."]
    echo: Annotated[bool | None, "Repeat the prompt at the beginning of the text."]
    log_probabilities: Annotated[
        int | None, "Return log-probabilities of the tokens and of this many likeliest tokens at each position."
    ]
    prompt_log_probabilities: Annotated[bool | None, "Return log-probabilities of the prompt's tokens too."]
    cache_salt: Annotated[
        str | None, "Isolates the prefix cache: only calls with the same salt share it. Use one per user."
    ]
    priority: Annotated[int | None, "Priority among the texts of its caller, -100 to 100: higher goes first."]


class _SampleOptions(TypedDict, total=False):
    sample_count: Annotated[int | None, "Texts to generate for each prompt, 1 to 16. Default: 1."]


class GenerateTextOptions(StreamGenerateTextOptions, _SampleOptions, total=False):
    """Options of GenerateText with prompts."""


class StreamChatOptions(StreamGenerateTextOptions, total=False):
    """Options of StreamGenerateText with a conversation."""

    tools: Annotated[Sequence[Tool] | None, "Tools that the model may call, at most 128."]
    tool_choice: Annotated[ToolChoice | str | None, "Whether the model calls tools. Default: auto."]
    required_tool_name: Annotated[str | None, "The one tool that the answer must call."]
    parallel_tool_calls: Annotated[bool | None, "Allow several calls in an answer. Default: true."]
    chat_template_kwargs: Annotated[
        str | Mapping[str, Any] | None,
        "Variables of the chat template, such as enable_thinking, as JSON text or as an object that json.dumps takes.",
    ]


class ChatOptions(StreamChatOptions, _SampleOptions, total=False):
    """Options of GenerateText with conversations."""


class _DecodingOptions(ModelOptions, SamplingOptions, total=False):
    max_new_tokens: Annotated[int | None, "Most tokens of a new text. Default: the model's maximum."]
    min_new_tokens: Annotated[int | None, "Tokens to generate before a new text may end, 0 to max_new_tokens."]
    length_penalty: Annotated[
        float | None, "Power of the token count in scores, 0 to 5: above 1 favours long texts. Default: 1."
    ]
    no_repeat_ngram_size: Annotated[
        int | None, "n-grams of this size may not repeat, 0 to 16; 0: no limit. Default: 0."
    ]


class _WritingOptions(_DecodingOptions, total=False):
    max_length_ratio: Annotated[float | None, "Most tokens of a new text per token of its source, above 0 to 100."]
    truncate: Annotated[
        bool | None, "Cut a text that is too long, where the model's truncation_side says, instead of refusing it."
    ]


class StreamRewriteTextOptions(_WritingOptions, total=False):
    """Options of StreamRewriteText."""

    target_prefix: Annotated[str | None, "What the new text begins with."]


class _BeamOptions(TypedDict, total=False):
    beam_size: Annotated[int | None, "Width of the beam search, 1 to 16. Default: 1, greedy decoding."]
    hypothesis_count: Annotated[int | None, "New texts to return for each input, 1 to beam_size. Default: 1."]
    early_stopping: Annotated[EarlyStopping | str | None, "When the beam search stops. Default: heuristic."]


class _SearchOptions(_BeamOptions, total=False):
    target_prefixes: Annotated[Texts | None, "What the new texts begin with: one for all, or one for each text."]
    phrase_constraints: Annotated[
        PhraseConstraints | Sequence[PhraseConstraints] | None,
        "Phrases that must or must not appear: for all new texts, or for each one.",
    ]


class _TranslationOptions(TypedDict, total=False):
    source_language: Annotated[str | None, "Language of the texts as a BCP 47 code. Default: the model's only one."]
    target_language: Annotated[str | None, "Language to translate to as a BCP 47 code. Default: the model's only one."]
    include_alignment: Annotated[bool | None, "Return which words were translated to which."]


class RewriteTextOptions(_WritingOptions, _SearchOptions, total=False):
    """Options of RewriteText."""


class StreamTranslateTextOptions(StreamRewriteTextOptions, _TranslationOptions, total=False):
    """Options of StreamTranslateText."""


class TranslateTextOptions(RewriteTextOptions, _TranslationOptions, total=False):
    """Options of TranslateText."""

    split_sentences: Annotated[bool | None, "Translate the sentences of each text separately and join them."]


class _CaptionOptions(_DecodingOptions, total=False):
    language: Annotated[str | None, "Language of the captions as a BCP 47 code. Default: the model's only one."]
    include_attention: Annotated[bool | None, "Return the attention of each caption token over the image."]


class CaptionImageOptions(_CaptionOptions, _BeamOptions, total=False):
    """Options of CaptionImage."""

    prefixes: Annotated[Texts | None, "What the captions begin with: one for all, or one for each image."]
    questions: Annotated[Texts | None, "What the model is asked about the images: one for all, or one for each image."]
    image_ids: Annotated[Texts | None, "Ids of prepared images, in place of images."]


class StreamCaptionImageOptions(_CaptionOptions, total=False):
    """Options of StreamCaptionImage."""

    prefix: Annotated[str | None, "What the caption begins with."]
    question: Annotated[str | None, "What the model is asked about the image."]
    image_id: Annotated[str | None, "Id of a prepared image, in place of the image."]


class SpeechTask(StrEnum):
    """Task of a transcription call."""

    TRANSCRIBE = "transcribe"
    """Transcription in the spoken language."""
    TRANSLATE = "translate"
    """Translation to English."""


class StreamTranscribeSpeechOptions(_DecodingOptions, total=False):
    """Options of StreamTranscribeSpeech."""

    language: Annotated[str | None, "Spoken language as a BCP 47 code. Default: detected."]
    task: Annotated[SpeechTask | str | None, "Task: transcribe, or translate to English. Default: transcribe."]
    include_timestamps: Annotated[bool | None, "Return segments with their start and end times."]
    prompt: Annotated[str | None, "Text before the audio, or names and words that it may contain."]
    condition_on_previous: Annotated[bool | None, "Condition each window of long audio on the text of earlier windows."]


class TranscribeSpeechOptions(StreamTranscribeSpeechOptions, _BeamOptions, total=False):
    """Options of TranscribeSpeech."""


class AudioFormat(StrEnum):
    """Encoding of synthesized audio."""

    WAV = "wav"
    """Of 16 bits."""
    FLAC = "flac"
    """Of 16 bits."""
    OPUS = "opus"
    """In OGG."""
    MP3 = "mp3"


class StreamSynthesizeSpeechOptions(ModelOptions, SamplingOptions, total=False):
    """Options of StreamSynthesizeSpeech. Options left out take the model's defaults."""

    voice: Annotated[str | None, "Voice, one of the model's. Default: the model chooses."]
    max_duration_seconds: Annotated[float | None, "Longest audio of a text, in seconds. Default: the model's limit."]
    speaking_rate: Annotated[float | None, "Times as fast as the model speaks by itself, 0.25 to 4. Default: 1."]


class SynthesizeSpeechOptions(StreamSynthesizeSpeechOptions, total=False):
    """Options of SynthesizeSpeech."""

    format: Annotated[AudioFormat | str | None, "Encoding of the audio: wav, flac, opus or mp3. Default: wav."]


class _TextOptions(ModelOptions, total=False):
    truncate: Annotated[
        bool | None, "Cut a text that is too long, where the model's truncation_side says, instead of refusing it."
    ]


class _PairOptions(_TextOptions, total=False):
    text_pairs: Annotated[Texts | None, "Second text of each pair, for models that read pairs."]


class ClassifyTextOptions(_PairOptions, total=False):
    """Options of ClassifyText."""

    top_k: Annotated[int | None, "Labels to return for each text, the most likely first. Default: all."]
    threshold: Annotated[float | None, "Probability from which a label applies, 0 to 1. Default: the model's own."]
    candidate_labels: Annotated[
        Texts | None, "Labels to choose from, for models of natural language inference. Default: the model's."
    ]
    hypothesis_template: Annotated[
        str | None, 'Sentence with {} where a candidate label goes. Default: "This example is {}.".'
    ]
    independent_labels: Annotated[bool | None, "Score every candidate label by itself."]


class ClassifyTokensOptions(_TextOptions, total=False):
    """Options of ClassifyTokens."""

    pages: Annotated[Page | Sequence[Page] | None, "Words with their boxes, for models that read boxes, and no texts."]


class AnswerQuestionOptions(ModelOptions, total=False):
    """Options of AnswerQuestion."""

    top_k: Annotated[int | None, "Most answers for each question, the best first, at most 100. Default: 1."]
    max_answer_token_count: Annotated[int | None, "Most tokens of an answer, at most 512. Default: 15."]
    window_token_count: Annotated[
        int | None, "Tokens of a window, question included. Default: 384, or the model's maximum if it is less."
    ]
    overlap_token_count: Annotated[
        int | None, "Tokens of a context that neighbouring windows share. Default: 128, or half if that is less."
    ]
    no_answer_threshold: Annotated[
        float | None,
        "Give no answer where its score exceeds the best answer's by more than this, -1 to 1. Default: always answer.",
    ]
    split_words: Annotated[bool, "Let answers begin and end within words, for languages without spaces."]


class FillMaskOptions(_TextOptions, total=False):
    """Options of FillMask."""

    top_k: Annotated[int | None, "Most tokens for each mask, the most likely first, at most 100. Default: 5."]
    targets: Annotated[Texts | None, "Tokens of the vocabulary to choose from. Default: all."]


class EmbedTextOptions(_PairOptions, total=False):
    """Options of EmbedText."""

    normalize: Annotated[bool | None, "Scale vectors to length 1. Default: true."]
    prompt_name: Annotated[
        str | None,
        "Name of the model's prompt before every text, or with multi_vector query or document. Default: the model's "
        "own, or none; document.",
    ]
    sparse: Annotated[bool, "Return sparse vectors, of a model that makes such. Normalize defaults to false then."]
    multi_vector: Annotated[bool, "Return a vector of each token, of a model of late interaction such as ColBERT."]


class ScoreTextOptions(_PairOptions, total=False):
    """Options of ScoreText."""


class ClassifyImageOptions(ModelOptions, total=False):
    """Options of ClassifyImage."""

    top_k: Annotated[int | None, "Labels to return for each image, the most likely first. Default: all."]
    candidate_labels: Annotated[Texts | None, "Labels to choose from, for embedding models. Default: the model's."]
    templates: Annotated[Texts | None, "Texts with {} where a candidate label goes. Default: the labels as they are."]
    image_ids: Annotated[Texts | None, "Ids of prepared images, in place of images."]


class ClassifyAudioOptions(ModelOptions, total=False):
    """Options of ClassifyAudio."""

    top_k: Annotated[int | None, "Labels to return for each audio, the most likely first. Default: all."]
    truncate: Annotated[bool, "Cut longer audio than the model reads. Default: refuse it."]


class ClassifyVideoOptions(ModelOptions, total=False):
    """Options of ClassifyVideo."""

    top_k: Annotated[int | None, "Labels to return, the most likely first. Default: all."]


class DetectObjectsOptions(ModelOptions, total=False):
    """Options of DetectObjects."""

    threshold: Annotated[
        float | None, "Objects with a score of at most this are left out, 0 to 1. Default: the model's, mostly 0.5."
    ]
    nms_threshold: Annotated[
        float | None,
        "Overlap of two boxes of a label above which the worse is left out, 0 to 1. Default: the model's.",
    ]
    max_object_count: Annotated[int | None, "Most objects for each image, the best first, at most 1000. Default: all."]
    labels: Annotated[
        Texts | None,
        "Labels whose objects are returned. Default: all. A model without labels of its own requires them: any texts.",
    ]
    image_ids: Annotated[Texts | None, "Ids of prepared images, in place of images."]


class ClassifyPixelsOptions(ModelOptions, total=False):
    """Options of ClassifyPixels."""

    labels: Annotated[
        Texts | None, "Texts of what to look for. A model without labels of its own requires them, others refuse them."
    ]
    image_ids: Annotated[Texts | None, "Ids of prepared images, in place of images."]


class EstimateDepthOptions(ModelOptions, total=False):
    """Options of EstimateDepth."""

    image_ids: Annotated[Texts | None, "Ids of prepared images, in place of images."]


class EmbedImageOptions(ModelOptions, total=False):
    """Options of EmbedImage."""

    normalize: Annotated[bool | None, "Scale vectors to length 1. Default: true."]
    image_ids: Annotated[Texts | None, "Ids of prepared images, in place of images."]


class PrepareImageOptions(TypedDict, total=False):
    """Options of PrepareImage."""

    model: Annotated[str | None, "Model to run on the images now. Default: none; each model runs at its first call."]
    model_version: Annotated[str | None, "Version of that model. Default: the latest loaded version."]


class _MaskOptions(ModelOptions, total=False):
    image_id: Annotated[str | None, "Id of a prepared image, in place of the image."]
    mask_format: Annotated[MaskFormat | str | None, "Format of masks: runs or png. Default: runs."]


class SegmentImageOptions(_MaskOptions, total=False):
    """Options of SegmentImage."""

    max_mask_count: Annotated[int | None, "Most masks for one point or one box, 0 to 3; 0: all. Default: 0."]


class SegmentEverythingOptions(_MaskOptions, total=False):
    """Options of SegmentEverything."""

    points_per_side: Annotated[int | None, "Points along each side of the grid, 0 to 32; 0: the default. Default: 16."]
    min_predicted_iou: Annotated[float | None, "Leave out masks with a lower predicted IoU. Default: 0.7."]
    min_stability: Annotated[float | None, "Leave out masks with a lower stability. Default: 0.8."]
    max_overlap: Annotated[float | None, "Of two masks with a larger IoU leave out the worse one. Default: 0.7."]


class SegmentInteractivelyOptions(_MaskOptions, total=False):
    """Options of SegmentInteractively."""

    max_mask_count: Annotated[int | None, "Most masks for one point or one box, 0 to 3; 0: all. Default: 0."]


class _ImageGenerationOptions(ModelOptions, total=False):
    negative_prompt: Annotated[str | None, "Negative prompt, of the same kind as the prompt. Default: none."]
    step_count: Annotated[int | None, "Steps from noise to the image, 1 to 250. Default: the model's, or 20."]
    guidance_scale: Annotated[float | None, "Guidance scale, 0 to 30; up to 1: none. Default: the model's, or 3."]
    sampler: Annotated[
        DiffusionSampler | str | None,
        "Sampler: ddim, dpm_solver_pp_2m, euler, euler_ancestral, ddpm, pndm, unipc or lcm. Default: the model's.",
    ]
    seed: Annotated[int | None, "Seed of the noise, which gives the same image again. Default: drawn by the server."]
    strength: Annotated[float | None, "Strength of an edit: share of the steps to run. Default: 0.8, or 1 with a mask."]
    image: Annotated[bytes | str | os.PathLike[str] | None, "Image to edit, as bytes or by path."]
    image_id: Annotated[str | None, "Id of a prepared image to edit."]
    mask: Annotated[
        bytes | str | os.PathLike[str] | None,
        "Inpainting mask of the image's size: white is generated anew. Default: all.",
    ]


class GenerateImageOptions(_ImageGenerationOptions, total=False):
    """Options of GenerateImage."""

    image_count: Annotated[int | None, "Images to generate, 1 to 16. Default: 1."]


class StreamGenerateImageOptions(_ImageGenerationOptions, total=False):
    """Options of StreamGenerateImage."""

    preview_step_count: Annotated[int | None, "Steps between two previews; 0: none. Default: 0."]


class _QueryOptions(ModelOptions, total=False):
    query_text: Annotated[str | None, "Text to compare with, if no image."]
    query_image: Annotated[bytes | str | os.PathLike[str] | None, "Image to compare with, as bytes or by path."]
    query_image_id: Annotated[str | None, "Id of a prepared image to compare with."]
    top_k: Annotated[int | None, "Results to return, the most similar first. Default: all."]


class RankImagesOptions(_QueryOptions, total=False):
    """Options of RankImages."""

    image_ids: Annotated[Texts | None, "Ids of prepared images, in place of images."]


class RankTextsOptions(_QueryOptions, total=False):
    """Options of RankTexts."""

    query_prompt_name: Annotated[str | None, "Name of the model's prompt before a text query."]
    prompt_name: Annotated[
        str | None, "Name of the model's prompt before every text. Default: the model's own, or none."
    ]
    truncate: Annotated[
        bool | None, "Cut a text that is too long, where the model's truncation_side says, instead of refusing it."
    ]


class AttentionOptions(ModelOptions, total=False):
    """Selection of attention weights."""

    layers: Annotated[Sequence[int] | None, "Layers to return, from 0. Default: all."]
    heads: Annotated[Sequence[int] | None, "Heads to return, from 0. Default: all."]
    summary: Annotated[AttentionSummary | str | None, "Summary of the heads. Default: a map for each head."]


class InspectTextOptions(AttentionOptions, total=False):
    """Options of InspectText."""

    text_pair: Annotated[str | None, "Second text, for models that read pairs."]
    truncate: Annotated[
        bool | None, "Cut a text that is too long, where the model's truncation_side says, instead of refusing it."
    ]


class InspectImageOptions(AttentionOptions, total=False):
    """Options of InspectImage."""

    image_id: Annotated[str | None, "Id of a prepared image, in place of the image."]


class InspectGenerationOptions(AttentionOptions, total=False):
    """Options of InspectGeneration."""

    truncate: Annotated[bool | None, "Cut the beginning off a text that is too long instead of refusing it."]


class InspectTranslationOptions(AttentionOptions, total=False):
    """Options of InspectTranslation."""

    translation: Annotated[str | None, "Translation of the text. Default: the model's own, by greedy decoding."]
    truncate: Annotated[
        bool | None,
        "Cut a source text that is too long, where the model's truncation_side says, instead of refusing it.",
    ]


class Option(NamedTuple):
    """One keyword argument."""

    type: Any
    """Type of its value, such as `float | None`."""
    description: str


@cache
def options_of(kind: Any) -> dict[str, Option]:
    """Lists the options of a typed dictionary of this package, by name."""
    hints = get_type_hints(kind, include_extras=True)
    return {name: Option(*get_args(hint)) for name, hint in hints.items()}


def spell_out(function: FunctionT) -> FunctionT:
    """Gives a function with `**options: Unpack[...]` a signature and a docstring that list the options one by one.

    Type checkers and editors read the typed dictionary by themselves; `help()` and `inspect.signature` do not.
    """
    signature = inspect.signature(function, eval_str=True)
    *parameters, variadic = signature.parameters.values()
    (kind,) = get_args(variadic.annotation)  # of Unpack
    assert variadic.kind is inspect.Parameter.VAR_KEYWORD
    options = options_of(kind)
    parameters += [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=option.type)
        for name, option in options.items()
    ]
    function.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    text = inspect.cleandoc(function.__doc__ or "")
    heading = [] if "\nArgs:\n" in text else ["", "Args:"]
    lines = [f"    {name}: {option.description}" for name, option in options.items()]
    function.__doc__ = "\n".join([text, *heading, *lines])
    return function
