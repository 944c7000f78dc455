"""What is made of a call's inputs is in an admission, by the bytes that it takes and not by those that were sent."""

import asyncio
import io
import math
import sys
import wave
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from PIL import Image

from headway_server.batching.settings import BatchingSettings
from headway_server.decoding.beam_search.rules import PhraseAutomaton
from headway_server.errors import OverloadedError
from headway_server.runtime import Runtime
from headway_server.serving.host import ModelHost
from headway_server.serving.images import SentImage
from headway_server.settings import ServerSettings
from headway_server.tasks.generation.request import GenerationRequest
from headway_server.tasks.image_generation.request import ImageGenerationRequest
from headway_server.tasks.segmentation.model import MAX_MASKS, EverythingRequest, MaskFormat, Point, SegmentPrompt
from headway_server.tasks.speech.transcripts import SpeechRequest
from headway_server.tasks.synthesis.request import SynthesisRequest
from headway_server.tasks.text.model import TextInputs
from headway_server.tasks.text_to_text.phrases import MAX_FORBIDDEN, PhraseRequest
from headway_server.tasks.text_to_text.request import TextToTextParameters, TextToTextRequest

MODELS = Path(__file__).parents[3] / "models"
NAMES = [folder.name for folder in MODELS.iterdir() if folder.is_dir()]
SIDE = 700


def png(colour="white", side=SIDE) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (side, side), colour).save(file, "PNG")
    return file.getvalue()


def sound(seconds: float) -> bytes:
    file = io.BytesIO()
    with wave.open(file, "wb") as opened:
        opened.setparams((1, 2, 8000, 0, "NONE", ""))
        opened.writeframes(bytes(2 * round(8000 * seconds)))
    return file.getvalue()


def sent(data: bytes, field: str) -> SentImage:
    return SentImage(data=data, field=field, key=data[-20:])


async def segment_everything(model):
    wanted = EverythingRequest(points_per_side=4, min_predicted_iou=0.0, min_stability=0.0, max_overlap=1.0)
    async with await model.segment_everything(
        sent(png(), "image"), wanted, mask_format=MaskFormat.RUNS, deadline=None
    ) as segments:
        return [mask async for mask in segments.masks]


FEW = {"parameters": {"max_new_tokens": 1}}
CALLS = {
    "an image that is classified": ("cifar10", lambda model: model.classify([png()], top_k=1, deadline=None)),
    "an image that is described": (
        "caption",
        lambda model: model.caption([png()], request=TextToTextRequest(target_language="en")),
    ),
    "an image that is drawn over": (
        "fashion-mnist-diffusion",
        lambda model: model.generate(
            ImageGenerationRequest(image=sent(png(), "image"), mask=sent(png(), "mask"), num_steps=1), deadline=None
        ),
    ),
    "latents of images that are drawn": (
        "fashion-mnist-diffusion",
        lambda model: model.generate(ImageGenerationRequest(num_images=2, num_steps=1), deadline=None),
    ),
    "tokens of texts that are spoken": (
        "telephone-speech",
        lambda model: model.synthesize(["one"], request=SynthesisRequest(max_seconds=0.1)),
    ),
    "phrases of a translation": (
        "multi30k-en-de",
        lambda model: model.write(
            ["a man"],
            request=TextToTextRequest(
                parameters=TextToTextParameters(max_new_tokens=1, beam_size=2),
                phrases=(PhraseRequest(forbidden=("two wolves",)),),
            ),
        ),
    ),
    "masks of a prompt": (
        "segment",
        lambda model: model.segment(sent(png(), "image"), [SegmentPrompt(points=(Point(9, 9),))], deadline=None),
    ),
    "masks of everything": ("segment", segment_everything),
    "audio": ("telephone-transcriber", lambda model: model.transcribe([sound(2)], request=SpeechRequest())),
    "texts": (
        "ag-news",
        lambda model: model.classify(
            TextInputs(texts=["prices " * 50] * 8, truncate=True), top_k=1, threshold=None, deadline=None
        ),
    ),
    "vectors of labels": ("clip-text", lambda model: model.embed_labels(["cat", "dog"], (), deadline=None)),
    "vectors of texts that are ranked": (
        "clip-text",
        lambda model: model.embed_set(["cat", "dog"], prompt_name="", truncate=False, deadline=None),
    ),
    "tokens of prompts": (
        "shakespeare",
        lambda model: model.generate(["The king"], fields=["prompts[0]"], request=GenerationRequest(**FEW)),
    ),
    "tokens of sources": (
        "multi30k-en-de",
        lambda model: model.write(
            ["a man"], request=TextToTextRequest(parameters=TextToTextParameters(max_new_tokens=1))
        ),
    ),
}
"""Of each kind of input, the model that reads it and a call."""


@contextmanager
def started(names, *, max_waiting_mib=1):
    """The shipped models of these names."""
    settings = ServerSettings(
        store=MODELS, batching=BatchingSettings(max_waiting_mib=max_waiting_mib), max_image_outputs_mib=0
    )
    host = ModelHost.open(
        Runtime(device="cpu", num_threads=1), settings, asked_for={f"{name}/1": name in names for name in NAMES}
    )
    for model in host.models:
        model.start()
    yield {model.bundle.manifest.name: model for model in host.models}
    host.close()


async def test_a_call_waits_for_no_memory_that_others_hold_and_gives_back_its_own():
    with started({name for name, _ in CALLS.values()}) as models:
        models["clip-text"].label_vectors._cache.max_bytes = 0  # so that they are computed each time
        for kind, (name, ask) in CALLS.items():
            model = models[name]
            admissions = [model._memory, model._admission]
            await ask(model)
            assert all(not one.num_admitted and not one._num_bytes for one in admissions), kind
            most = max(one._max_bytes or 0 for one in admissions)
            with ExitStack() as held:
                for one in admissions:
                    held.enter_context(one.admit(1, most if one._max_bytes else 0))
                with pytest.raises(OverloadedError, match=r"\d+ bytes of .* waiting"):
                    await ask(model)


@contextmanager
def most_held(model):
    """The most bytes that the model has held, once the context has ended."""
    admission, most = model._memory, [0]

    def count(number, num_bytes):
        type(admission)._count(admission, number, num_bytes)
        most[0] = max(most[0], admission._num_bytes)

    admission._count = count
    yield most
    del admission._count


PHRASES = PhraseRequest(forbidden=tuple(f"two wölves {number} {'very ' * 20}old" for number in range(MAX_FORBIDDEN)))


def size_of_phrases(model):
    forms = model._phrases.encode_phrases("phrases", PHRASES).forbidden
    numbers = sum(map(sys.getsizeof, (token for form in forms for token in form)))
    nodes = PhraseAutomaton(forms)
    parts = (nodes._children, nodes._depth, nodes._back, nodes._ending, nodes._unfinished)
    return numbers + sum(sys.getsizeof(part) + sum(map(sys.getsizeof, part)) for part in (forms, *parts))


def size_of_audio(model):
    audio = model.bundle.manifest.audio_preprocessing
    num_frames = 2 * audio.sampling_rate // audio.hop_length
    assert num_frames < audio.num_frames
    return 4 * (2 * audio.sampling_rate + 2 * audio.num_frames * audio.num_mel_bins)  # features and a window of them


HELD = {
    "forms of phrases": (
        "multi30k-en-de",
        lambda model: model.write(
            ["a man"] * 2,
            request=TextToTextRequest(
                parameters=TextToTextParameters(max_new_tokens=1, beam_size=2), phrases=(PHRASES, PHRASES)
            ),
        ),
        size_of_phrases,
    ),
    "audio, its features, and a window of them": (
        "telephone-transcriber",
        lambda model: model.transcribe([sound(2)], request=SpeechRequest()),
        size_of_audio,
    ),
    "latents and what is drawn": (
        "fashion-mnist-diffusion",
        lambda model: model.generate(ImageGenerationRequest(num_images=4, num_steps=1), deadline=None),
        lambda model: 4 * 3 * 4 * math.prod(model._latent_shape),
    ),
}


async def test_what_is_made_of_inputs_is_held_by_its_size():
    with started({name for name, _, _ in HELD.values()}) as models:
        for kind, (name, ask, size) in HELD.items():
            with most_held(models[name]) as most:
                await ask(models[name])
            assert most[0] >= size(models[name]), kind
            assert not models[name]._memory._num_bytes
        encoded = models["multi30k-en-de"]._phrases.encode_phrases("phrases", PHRASES)
        held = size_of_phrases(models["multi30k-en-de"]), encoded.num_bytes, PHRASES.most_bytes
        assert sorted(held) == list(held), "a call gives back what its phrases could have taken once they are read"
        assert held[1] <= 1.5 * held[0]


async def test_calls_for_everything_run_beside_each_other_in_less_than_all_their_masks_take():
    wanted = EverythingRequest(points_per_side=8, min_predicted_iou=0.0, min_stability=0.0)
    pictures = [sent(png(colour), "image") for colour in ("white", "red", "blue")]

    with started({"segment"}, max_waiting_mib=24) as models:
        model = models["segment"]

        async def ask(picture):
            async with await model.segment_everything(
                picture, wanted, mask_format=MaskFormat.RUNS, deadline=None
            ) as segments:
                return [list(mask.counts) async for mask in segments.masks]

        assert 2 * 64 * MAX_MASKS * model._mask_bytes == 24 * 2**20  # all logits of two such calls
        together = await asyncio.gather(*map(ask, pictures))
        assert together == [await ask(picture) for picture in pictures]
        assert not model._memory.num_admitted
