"""Captions of images: exported with proof, served on the engine that translates, and shown on the command line."""

import asyncio
import json

import grpc
import numpy as np
import pytest
import tiny_captioner
import torch
from PIL import Image
from rpc_failures import failure_of
from tiny_captioner import CAPTIONS, COLOURS, GRID, SIDE, picture
from typer.testing import CliRunner

from headway.oip import grpc_predict_v2_pb2 as oip_pb
from headway.oip import grpc_predict_v2_pb2_grpc as oip_grpc
from headway.v1 import caption_service_pb2 as pb
from headway.v1 import caption_service_pb2_grpc as pb_grpc
from headway.v1 import common_pb2
from headway.v1 import image_service_pb2 as images_pb
from headway.v1 import image_service_pb2_grpc as images_grpc
from headway_client import Client
from headway_client.cli import app
from headway_export.errors import SourceError
from headway_export.source import from_factory
from headway_server.bundles import ImagePreprocessing, Precision, open_bundle
from headway_training.checkpoint import load_model, load_tokenizer
from headway_training.cli import app as training_app
from headway_training.data.images import normalize
from headway_training.models.parts.attention import RecordingKernel, causal_attention, cross_attention
from headway_training.tasks.captioning import score_captions

from .conftest import serve


@pytest.fixture
def checkpoint(captioner_checkpoint):
    return captioner_checkpoint


@pytest.fixture(scope="module")
def address(captioner_store, tmp_path_factory):
    yield from serve(captioner_store, "fp32", tmp_path_factory.mktemp("log") / "server.log")


@pytest.fixture
async def channel(address):
    async with grpc.aio.insecure_channel(address) as opened:
        yield opened


def stub(channel):
    return pb_grpc.CaptionServiceStub(channel)


def decoding(**fields):
    return common_pb2.DecodingParameters(**fields)


def test_both_precisions_are_proved_on_captions_of_both_languages(captioner_store):
    manifest = open_bundle(captioner_store / "colours" / "1").manifest
    assert manifest.languages.targets == ("en", "de")
    assert manifest.patches.rows == manifest.patches.columns == GRID
    for precision in (Precision.FP32, Precision.INT8):
        variant = manifest.variants[precision]
        assert variant.quality.metric == "cider"
        assert variant.quality.value > 500  # its captions are the references
        assert variant.alignment_layer == 0
    assert manifest.variants[Precision.FP32].parity.greedy_mismatch_count == 0


def test_a_captioner_from_outside_states_its_patches_and_needs_its_preprocessing(checkpoint):
    given = {"task": "captioning", "name": "mine", "tokenizer_file": checkpoint / "tokenizer.json"}
    weights = checkpoint / "model.safetensors"
    with pytest.raises(SourceError, match="--task captioning needs --preprocessing"):
        from_factory("tiny_captioner:build", weights, **given)
    preprocessing = ImagePreprocessing.model_validate(tiny_captioner.PREPROCESSING.model_dump())
    source = from_factory("tiny_captioner:build", weights, **given, image_preprocessing=preprocessing)
    assert source.limits.max_input_tokens == GRID * GRID
    assert source.special_tokens is not None


@pytest.mark.asyncio
async def test_each_image_is_named_in_the_language_that_is_asked_for(channel):
    images = [picture(name, (40, 20)) for name in COLOURS]
    for language, captions in CAPTIONS.items():
        answer = await stub(channel).CaptionImage(pb.CaptionImageRequest(images=images, language=language.upper()))
        assert [result.text for result in answer.results] == list(captions.values())
        first = answer.results[0]
        assert (first.width, first.height) == (40, 20)
        assert [first.seen_part.right, first.seen_part.bottom] == pytest.approx([40, 20])
        assert (first.patch_row_count, first.patch_column_count) == (GRID, GRID)
        assert answer.model.name == "colours"


@pytest.mark.asyncio
async def test_a_caption_does_not_depend_on_what_is_written_beside_it(channel):
    beams = decoding(beam_size=3, hypothesis_count=3)
    alone = []
    for name in COLOURS:
        request = pb.CaptionImageRequest(images=[picture(name)], language="de", parameters=beams)
        alone += (await stub(channel).CaptionImage(request)).results
    together = await asyncio.gather(
        *(
            stub(channel).CaptionImage(
                pb.CaptionImageRequest(images=[picture(name) for name in COLOURS], language=language, parameters=beams)
            )
            for language in ("de", "en", "de")
        )
    )
    for answer in (together[0], together[2]):
        assert list(answer.results) == alone
    assert len(alone[0].hypotheses) == 3
    scores = [one.score for one in alone[0].hypotheses]
    assert scores == sorted(scores, reverse=True)


@pytest.mark.asyncio
async def test_a_stream_and_a_prefix_give_the_same_caption(channel):
    request = pb.StreamCaptionImageRequest(
        image=picture("blue"), language="en", prefix="a wall", include_attention=True
    )
    parts = [part async for part in stub(channel).StreamCaptionImage(request)]
    whole = await stub(channel).CaptionImage(
        pb.CaptionImageRequest(images=[picture("blue")], language="en", prefixes=["a wall"], include_attention=True)
    )
    assert parts[0].text_delta.startswith("a wall")
    assert "".join(part.text_delta for part in parts) == parts[-1].result.text == CAPTIONS["en"]["blue"]
    assert parts[-1].result == whole.results[0]


@pytest.mark.asyncio
async def test_attention_is_that_of_pytorch_and_sums_to_one(channel, checkpoint):
    answer = await stub(channel).CaptionImage(
        pb.CaptionImageRequest(images=[picture("red")], language="en", include_attention=True)
    )
    [result] = answer.results
    maps = np.array([token.patch_attention for token in result.tokens])
    np.testing.assert_allclose(maps.sum(axis=1), 1, atol=1e-5)
    words = [result.text[token.span.start : token.span.end] for token in result.tokens]
    assert "".join(words) == result.text.replace(" ", "")
    model, described = load_model(checkpoint)
    tokenizer = load_tokenizer(checkpoint)
    image = np.full((1, SIDE, SIDE, 3), COLOURS["red"], np.uint8)
    ids = tokenizer.encode(result.text, add_special_tokens=False).ids
    start = [described.special_tokens.bos, described.language_tokens["en"]]
    kernel = RecordingKernel()
    with torch.inference_mode():
        memory = model.encode(torch.from_numpy(normalize(image, described.image_preprocessing)))
        attend_cross = cross_attention(model.cross_keys_values(memory), torch.ones(1, GRID * GRID), kernel)
        read = torch.tensor([[*start, *ids]])
        model.decode(read, torch.arange(read.shape[1]), causal_attention(), attend_cross)
    expected = kernel.weights[0][0].mean(dim=0)[1 : 1 + len(maps)].numpy()  # of what each token was written after
    np.testing.assert_allclose(maps, expected, atol=1e-4)


@pytest.mark.asyncio
async def test_an_image_is_named_by_its_id(channel):
    kept = await images_grpc.ImageServiceStub(channel).PrepareImage(
        images_pb.PrepareImageRequest(images=[picture("green")])
    )
    ids = [kept.results[0].image_id]
    answer = await stub(channel).CaptionImage(pb.CaptionImageRequest(image_ids=ids, language="de"))
    assert answer.results[0].text == CAPTIONS["de"]["green"]


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("fields", "field", "words"),
    [
        ({}, "language", "is empty; colours writes en, de: name one"),
        ({"language": "fr"}, "language", "is 'fr'; colours writes en, de"),
        ({"language": "en", "prefixes": ["a", "b"]}, "prefixes", "has 2 elements"),
        ({"language": "en", "prefixes": ["a wall " * 40]}, "prefixes[0]", "tokens"),
        ({"language": "en", "parameters": decoding(max_length_ratio=2)}, "parameters.max_length_ratio", "no tokens"),
        ({"language": "en", "images": [b"no image"]}, "images[0]", "image"),
        ({"language": "en", "images": [b""] * 65}, "images", "64"),
    ],
)
async def test_what_cannot_be_captioned_is_refused_with_a_sentence(channel, fields, field, words):
    request = pb.CaptionImageRequest(**{"images": [picture("red")], **fields})
    failure = await failure_of(stub(channel).CaptionImage(request))
    assert failure.code is grpc.StatusCode.INVALID_ARGUMENT
    assert failure.field == field
    assert words in failure.message


@pytest.mark.asyncio
async def test_the_open_inference_protocol_captions_images_by_tensors(channel):
    request = oip_pb.ModelInferRequest(model_name="colours")
    request.parameters["target_language"].string_param = "de"
    request.inputs.add(name="image", datatype="BYTES", shape=[2]).contents.bytes_contents.extend(
        [picture("red"), picture("green")]
    )
    request.outputs.add(name="caption")
    answer = await oip_grpc.GRPCInferenceServiceStub(channel).ModelInfer(request)
    written = [element.decode() for element in answer.outputs[0].contents.bytes_contents]
    assert written == [CAPTIONS["de"]["red"], CAPTIONS["de"]["green"]]


def test_the_command_line_says_what_is_in_a_file_and_draws_what_each_word_looked_at(address, tmp_path):
    photo, drawn = tmp_path / "photo.png", tmp_path / "map.png"
    photo.write_bytes(picture("blue", (60, 30)))
    runner, flags = CliRunner(), ["--language", "de", "--server", address]
    result = runner.invoke(app, ["caption", str(photo), "--attention", str(drawn), *flags])
    assert result.exit_code == 0, result.output
    assert result.output.strip() == CAPTIONS["de"]["blue"]
    with Image.open(drawn) as opened:
        assert opened.width > opened.height
    result = runner.invoke(app, ["caption", str(photo), "--stream", "--prefix", "eine", *flags])
    assert result.output.strip() == CAPTIONS["de"]["blue"]
    result = runner.invoke(app, ["caption", str(photo), "--include-attention", *flags])
    assert result.output.splitlines()[1].split()[0] == "eine"
    with Client(address) as client:
        [caption] = client.caption_image(photo, language="de", include_attention=True)
        maps = caption.word_maps()
        assert [found.word.of(caption.text) for found in maps] == ["eine", "blaue", "Wand"]
        assert np.array(maps[0].attention).shape == (GRID, GRID)
        with pytest.raises(ValueError, match="include_attention=True"):
            client.caption_image(photo, language="de")[0].word_maps()


def test_captions_are_measured_against_those_of_people(address, tmp_path):
    for number, colour in enumerate(("red", "navy", "white")):
        Image.new("RGB", (40, 30), colour).save(tmp_path / f"{number}.png")
    with Client(address) as client:
        files = [tmp_path / f"{number}.png" for number in range(3)]
        written = [one.text for one in client.caption_image(files, language="de")]
    file = tmp_path / "captions.tsv"
    lines = [f"{number}.png\t{text}" for number, text in enumerate(written) for _ in range(2)]
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    command = ["evaluate", "colours", "--server", address, "--file", str(file), "--option", "language=de", "--json"]
    result = CliRunner().invoke(training_app, command, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout.strip().splitlines()[-1])
    assert (report["metric"], report["example_count"], report["unit"]) == ("cider", 3, "images")
    expected = score_captions({"de": written}, {"de": [[text] * 2 for text in written]})
    assert report["figures"] == pytest.approx(expected)
    assert expected["meteor_de"] > 0, "they are the model's own"
