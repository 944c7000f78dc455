"""Examples of every RPC: what is asked, and what a right answer has in it.

The inputs are drawn, spoken and written for the demo. A function of this page makes the calls of an example and returns
its answer; it names the shipped model whose answer is expected.
"""

from __future__ import annotations

import io
import wave
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from draw import STAR, draw_pictures, draw_scene
from PIL import Image

from headway_client import Client, LabelScore, Mask, SegmentPrompt, TextDelta

SAMPLES = Path(__file__).parent / "samples"
SAID = "three seven one"
"""What the sample `said.wav` says."""

_PICTURES = draw_pictures()
_SCENE = draw_scene()
_STAR = (np.asarray(Image.open(io.BytesIO(_SCENE))) == STAR).all(axis=-1)  # H W
_STAR_CENTRE = (90, 120)
_HEADLINE = "Oil prices fall again"
_NAMES = ("a car", "a dog", "a house", "a star", "a tree")
_TEXTS = ("A puppy runs over the grass.", "A man plays the guitar.", "A woman rides a bicycle.")


@dataclass(frozen=True, slots=True)
class Example:
    """An example of one RPC or of several."""

    rpcs: str
    """Their names, with commas between them."""
    asked: str
    answer: Callable[[Client, str], str]
    """Asks a server, and returns its answer."""
    expected: str = ""
    """Part of each right answer; empty: the answer is shown, and not checked."""


def _drawn(asked: str) -> bytes:
    """Returns the drawing of what the last word names."""
    return _PICTURES[asked.rpartition(" ")[2]]


def _first(labels: Sequence[LabelScore]) -> str:
    return f"{labels[0].label} {labels[0].probability:.0%}"


def _joined(stream: Iterable[TextDelta]) -> str:
    return "".join(delta.text for delta in stream)


def _translated(model: str, client: Client, text: str) -> str:
    return client.translate_text(text, model=model)[0].text


def _translated_in_parts(client: Client, text: str) -> str:
    return _joined(client.stream_translate_text(text, model="multi30k-en-de"))


def _continued(client: Client, prompt: str) -> str:
    return client.generate_text(prompt, max_new_tokens=8, temperature=0, model="shakespeare")[0].text


def _continued_in_parts(client: Client, prompt: str) -> str:
    return _joined(client.stream_generate_text(prompt, max_new_tokens=8, temperature=0, model="shakespeare"))


def _topic(client: Client, headline: str, model: str = "ag-news") -> str:
    return _first(client.classify_text(headline, model=model)[0].labels)


def _parts_of_speech(client: Client, text: str) -> str:
    return " ".join(found.label for found in client.classify_tokens(text, model="ud-ewt-pos")[0].spans)


def _nearest_text(client: Client, text: str) -> str:
    vectors = client.embed_text([text, *_TEXTS], model="clip-text").to_numpy()
    return _TEXTS[int(np.argmax(vectors[1:] @ vectors[0]))]


def _name(client: Client, _: str) -> str:
    return _NAMES[client.rank_texts(_NAMES, query_image=_SCENE, model="clip-text")[0].index]


def _most_attended_token(client: Client, text: str) -> str:
    inspected = client.inspect_text(text, summary="rollout", model="ag-news")[0]
    return inspected.tokens[int(inspected.attention.to_numpy()[0].mean(axis=0).argmax())].text


def _source_of_second_word(client: Client, text: str) -> str:
    inspected = client.inspect_translation(text, summary="mean", model="multi30k-en-de")[0]
    weights = inspected.cross_attention.to_numpy().mean(axis=0)[1]  # S, of the row that predicts the second token
    target, source = inspected.target_tokens[2], inspected.source_tokens[int(weights.argmax())]
    return f"{target.text.strip()} from {source.text.strip()}"


def _last_token_attends_to(client: Client, text: str) -> str:
    inspected = client.inspect_generation(text, summary="mean", model="shakespeare")[0]
    return inspected.tokens[int(inspected.attention.to_numpy().mean(axis=0)[-1].argmax())].text


def _label(client: Client, asked: str, image: Path | None = None) -> str:
    return _first(client.classify_image(image or _drawn(asked), model="cifar10")[0].labels)


def _chosen_label(client: Client, _: str) -> str:
    return _first(client.classify_image(_SCENE, candidate_labels=_NAMES, model="clip-image")[0].labels)


def _objects(client: Client, _: str) -> str:
    found = client.detect_objects(_SCENE, model="detect")[0].objects
    return ", ".join(sorted(each.label for each in found))


def _objects_by_id(client: Client, _: str) -> str:
    [prepared] = client.prepare_image(_SCENE)
    found = client.detect_objects(image_ids=prepared.image_id, model="detect")[0].objects
    return ", ".join(sorted(each.label for each in found))


def _nearest_drawing(client: Client, asked: str) -> str:
    names = ("frog", "airplane", "automobile")
    images = [_drawn(asked), *(_PICTURES[name] for name in names)]
    vectors = client.embed_image(images, model="cifar10-dino").to_numpy()
    return f"nearest: {names[int(np.argmax(vectors[1:] @ vectors[0]))]}"


def _best_drawing(client: Client, text: str) -> str:
    ranked = client.rank_images(list(_PICTURES.values()), query_text=text, model="clip-image")
    return list(_PICTURES)[ranked[0].index]


def _caption(client: Client, asked: str, image: Path | None = None) -> str:
    return client.caption_image(image or _drawn(asked), language="en", model="caption")[0].text


def _caption_in_parts(client: Client, asked: str) -> str:
    return _joined(client.stream_caption_image(_drawn(asked), language="de", model="caption"))


def _shape(png: bytes) -> str:
    """Returns the extent of what is drawn on black."""
    drawn = np.asarray(Image.open(io.BytesIO(png)).convert("L")) > 64  # H W
    width, height = int(drawn.any(axis=0).sum()), int(drawn.any(axis=1).sum())
    kind = "wide" if width > 1.5 * height else "high" if height > 1.5 * width else "square"
    return f"{kind}, {width}x{height} pixels"


def _generated(client: Client, label: str) -> str:
    return _shape(client.generate_image(label, seed=7, model="fashion-mnist-diffusion")[0].png)


def _generated_in_steps(client: Client, label: str) -> str:
    stream = client.stream_generate_image(label, seed=7, model="fashion-mnist-diffusion")
    list(stream)
    return _shape(stream.answer[0].png)


def _best_mask(masks: Iterable[Mask]) -> str:
    """Returns the IoU of the drawn star with the mask that is most like it."""
    pixels = [mask.to_numpy() for mask in masks]
    iou = max(((each & _STAR).sum() / (each | _STAR).sum() for each in pixels), default=0)
    return f"{'the star' if iou > 0.8 else 'no star'}, IoU {iou:.2f}"


def _cut_out(client: Client, _: str) -> str:
    answer = client.segment_image(_SCENE, prompts=SegmentPrompt(points=[_STAR_CENTRE]), model="segment")
    return _best_mask(answer[0].masks[:1])


def _cut_out_by_two_clicks(client: Client, _: str) -> str:
    with client.segment_interactively(_SCENE, model="segment") as session:
        session.add(points=[_STAR_CENTRE])
        return _best_mask(session.add(points=[(90, 95)]))


def _cut_out_among_all(client: Client, _: str) -> str:
    return _best_mask(client.segment_everything(_SCENE, model="segment"))


def _most_attended_patch(client: Client, _: str) -> str:
    inspected = client.inspect_image(_SCENE, summary="mean", model="clip-image")[0]
    patch = inspected.patches[int(inspected.attention.to_numpy().mean(axis=(0, 1)).argmax())]
    column, row = int(patch.left + patch.right) // 2, int(patch.top + patch.bottom) // 2
    return f"{'in the star' if _STAR[row, column] else 'elsewhere'}, at {column},{row}"


def _heard(client: Client, audio: bytes | Path) -> str:
    return client.transcribe_speech(audio, model="telephone-transcriber")[0].text


def _heard_again(client: Client, text: str) -> str:
    spoken = client.synthesize_speech(text, voice="theo", seed=1, model="telephone-speech")
    return _heard(client, spoken[0].audio)


def _heard_again_from_parts(client: Client, text: str) -> str:
    with wave.open(file := io.BytesIO(), "wb") as audio:
        audio.setparams((1, 2, 8000, 0, "NONE", ""))
        for delta in client.stream_synthesize_speech(text, voice="theo", seed=1, model="telephone-speech"):
            audio.writeframes(delta.pcm)
    return _heard(client, file.getvalue())


def _heard_file(client: Client, name: str, audio: Path | None = None) -> str:
    return _heard(client, audio or SAMPLES / name)


def _heard_file_in_parts(client: Client, name: str) -> str:
    return _joined(client.stream_transcribe_speech(SAMPLES / name, model="telephone-transcriber"))


def _described(client: Client, _: str) -> str:
    models = client.list_models().models
    described = [client.get_model(model.name, model_version=model.version).model for model in models]
    return f"{'all' if described == list(models) else 'some'} of {len(models)} are as listed"


def _ready(client: Client, _: str) -> str:
    changed, bundles = client.scan_store(), client.list_bundles()
    is_ready = all(bundle.state == "ready" for bundle in bundles)
    return f"{'all' if is_ready else 'some'} of {len(bundles)} ready, {len(changed)} new"


def _topic_after_load(client: Client, headline: str) -> str:
    version = client.get_model("ag-news").model.version
    client.unload_model("ag-news", model_version=version)
    client.load_model("ag-news", model_version=version)
    return _topic(client, headline)


def _topic_by_alias(client: Client, headline: str) -> str:
    client.set_route("ag-news", default_version="1")
    client.set_alias("topics", model="ag-news")
    return _topic(client, headline, model="topics")


def _extracted(client: Client, question: str) -> str:
    return client.answer_question(question, "A man sells ice at the beach.")[0].answers[0].text


def _filled(client: Client, text: str) -> str:
    return client.fill_mask(text)[0].masks[0].tokens[0].token


def _pixel_labels(client: Client, asked: str) -> str:
    return ", ".join(found.label for found in client.classify_pixels(_drawn(asked))[0].labels)


EXAMPLES = (
    Example("TranslateText", "A man rides a bicycle.", partial(_translated, "multi30k-en-de"), "Fahrrad"),
    Example("TranslateText", "Ein Hund rennt im Schnee.", partial(_translated, "multi30k-de-en"), "snow"),
    Example("StreamTranslateText", "A woman reads a book.", _translated_in_parts, "Buch"),
    Example("ClassifyText", _HEADLINE, _topic, "Business"),
    Example("ClassifyText", "Late goal wins the cup", _topic, "Sports"),
    Example("ClassifyText", "New planet is discovered", _topic, "Sci/Tech"),
    Example("ClassifyTokens", "She sold old books.", _parts_of_speech, "VERB ADJ NOUN"),
    Example("EmbedText", "A girl on a bike", _nearest_text, "bicycle"),
    Example("RankTexts", "drawn scene: 5 names", _name, "a star"),
    Example("GenerateText", "Romeo! wherefore art", _continued, "thou"),
    Example("StreamGenerateText", "To be, or not to", _continued_in_parts, " be "),
    Example("InspectText", _HEADLINE, _most_attended_token, "oil"),
    Example("InspectTranslation", "A man rides a bicycle.", _source_of_second_word, "from man"),
    Example("InspectGeneration", "O Juliet, sweet Juliet", _last_token_attends_to),
    Example("ClassifyImage", "a drawn ship", _label, "ship"),
    Example("ClassifyImage", "a drawn frog", _label, "frog"),
    Example("ClassifyImage", "drawn scene: 5 names", _chosen_label, "a star"),
    Example("DetectObjects", "drawn scene", _objects, "balloon, star"),
    Example("PrepareImage", "drawn scene, sent once", _objects_by_id, "balloon, star"),
    Example("EmbedImage", "a drawn truck", _nearest_drawing, "automobile"),
    Example("RankImages", "a brown horse", _best_drawing, "horse"),
    Example("CaptionImage", "a drawn dog", _caption, "brown dog"),
    Example("StreamCaptionImage", "a drawn dog", _caption_in_parts, "Ein Hund"),
    Example("GenerateImage", "Sneaker", _generated, "wide"),
    Example("StreamGenerateImage", "Trouser", _generated_in_steps, "high"),
    Example("SegmentImage", "drawn scene, a click", _cut_out, "the star"),
    Example("SegmentInteractively", "drawn scene, two clicks", _cut_out_by_two_clicks, "the star"),
    Example("SegmentEverything", "drawn scene, no click", _cut_out_among_all, "the star"),
    Example("InspectImage", "drawn scene", _most_attended_patch, "in the star"),
    Example("SynthesizeSpeech", "one", _heard_again, "one"),
    Example("StreamSynthesizeSpeech", "two", _heard_again_from_parts, "two"),
    Example("TranscribeSpeech", "said.wav", _heard_file, SAID),
    Example("StreamTranscribeSpeech", "said.wav", _heard_file_in_parts, SAID),
    Example("ListModels, GetModel", "each model, described", _described, "all"),
    Example("ListBundles, ScanStore", "the bundles", _ready, "all"),
    Example("UnloadModel, LoadModel", _HEADLINE, _topic_after_load, "Business"),
    Example("SetRoute, SetAlias", _HEADLINE, _topic_by_alias, "Business"),
    # Other stores have models for these.
    Example("AnswerQuestion", "Who sells ice?", _extracted),
    Example("FillMask", "A man rides a [MASK].", _filled),
    Example("RewriteText", _HEADLINE, lambda client, text: client.rewrite_text(text)[0].text),
    Example("StreamRewriteText", _HEADLINE, lambda client, text: _joined(client.stream_rewrite_text(text))),
    Example("ScoreText", _HEADLINE, lambda client, text: str(client.score_text(text, text_pairs=text)[0].score)),
    Example("ClassifyAudio", "said.wav", lambda client, name: _first(client.classify_audio(SAMPLES / name)[0].labels)),
    Example("ClassifyVideo", "16 frames", lambda client, _: _first(client.classify_video([_SCENE] * 16)[0].labels)),
    Example("ClassifyPixels", "a drawn dog", _pixel_labels),
    Example("EstimateDepth", "a drawn dog", lambda client, asked: str(client.estimate_depth(_drawn(asked))[0].maximum)),
)


def examples_of(images: Iterable[Path], recordings: Iterable[Path]) -> list[Example]:
    """Returns examples of the user's files, whose right answers are not known."""
    examples = []
    for path in images:
        examples.append(Example("ClassifyImage", path.name, partial(_label, image=path)))
        examples.append(Example("CaptionImage", path.name, partial(_caption, image=path)))
    examples += [Example("TranscribeSpeech", path.name, partial(_heard_file, audio=path)) for path in recordings]
    return examples
