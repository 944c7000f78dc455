"""InspectionService through a real channel: what it answers and refuses, and that it opens its graph at first use."""

import asyncio
from io import BytesIO
from pathlib import Path

import grpc
import numpy as np
import pytest
from PIL import Image
from rpc_failures import failure_of

from headway.v1 import inspection_service_pb2 as pb
from headway.v1 import inspection_service_pb2_grpc as pb_grpc
from headway.v1 import text_classification_service_pb2 as texts_pb

TEXT = "the old summer"
SHIPPED = Path(__file__).parents[4] / "models"


def stub(serving) -> "pb_grpc.InspectionServiceAsyncStub":
    return pb_grpc.InspectionServiceStub(serving.channel)


def maps_of(attention: pb.Attention) -> np.ndarray:
    return np.array([each.weights for each in attention.maps]).reshape(-1, attention.row_count, attention.column_count)


def picture(size: tuple[int, int] = (40, 20)) -> bytes:
    buffer = BytesIO()
    Image.new("RGB", size, "red").save(buffer, "PNG")
    return buffer.getvalue()


@pytest.fixture
async def serving(serve, tiny_store):
    async with serve(tiny_store) as started:
        yield started


async def test_a_text_comes_back_as_tokens_with_their_characters_and_the_maps_of_every_head(serving):
    response = await stub(serving).InspectText(pb.InspectTextRequest(text=TEXT))
    result = response.result
    assert response.model.name == "tiny-classification"
    assert [TEXT[token.span.start : token.span.end] for token in result.tokens] == ["", "the", "old", "summer"]
    assert result.tokens[0].text == "[CLS]"
    assert [(each.layer, each.head) for each in result.attention.maps] == [
        (layer, head) for layer in (0, 1) for head in range(4)
    ]
    maps = maps_of(result.attention)
    assert maps.shape == (8, 4, 4)
    np.testing.assert_allclose(maps.sum(-1), 1, atol=1e-5)
    assert response.timings.inference.nanos > 0


async def test_a_summary_has_no_head_and_a_rollout_no_layer(serving):
    for summary, layers in ((pb.ATTENTION_SUMMARY_MEAN, [0, 1]), (pb.ATTENTION_SUMMARY_ROLLOUT, [None])):
        options = pb.AttentionOptions(summary=summary)
        response = await stub(serving).InspectText(pb.InspectTextRequest(text=TEXT, attention=options))
        maps = response.result.attention.maps
        assert [each.layer if each.HasField("layer") else None for each in maps] == layers
        assert not any(each.HasField("head") for each in maps)
        np.testing.assert_allclose(maps_of(response.result.attention).sum(-1), 1, atol=1e-5)


async def test_a_token_classifier_is_inspected_if_it_is_named(serving):
    response = await stub(serving).InspectText(pb.InspectTextRequest(text="quick fox", model="tiny-tokens"))
    assert response.model.name == "tiny-tokens"
    assert len(response.result.tokens) == response.result.attention.row_count


async def test_a_generation_model_reads_a_text_at_once(serving):
    text = "practice makes perfect"
    options = pb.AttentionOptions(layers=[1], heads=[0, 3])
    response = await stub(serving).InspectGeneration(pb.InspectGenerationRequest(text=text, attention=options))
    assert "".join(token.text for token in response.result.tokens) == text
    maps = maps_of(response.result.attention)
    assert maps.shape == (2, len(text), len(text))
    assert (np.triu(maps, 1) == 0).all()


async def test_a_translation_is_made_if_none_is_given(serving):
    made = (await stub(serving).InspectTranslation(pb.InspectTranslationRequest(text="one two three"))).result
    assert made.translation == "drei zwei eins"
    assert [token.text.strip() for token in made.target_tokens] == ["<s>", "drei", "zwei", "eins"]
    assert [token.text.strip() for token in made.source_tokens] == ["one", "two", "three", "</s>"]
    assert maps_of(made.encoder_attention).shape == (4, 4, 4)
    assert maps_of(made.decoder_attention).shape == (8, 4, 4)
    request = pb.InspectTranslationRequest(text="one two three", translation="drei")
    given = (await stub(serving).InspectTranslation(request)).result
    assert maps_of(given.cross_attention).shape == (8, 2, 4)
    np.testing.assert_allclose(maps_of(given.cross_attention), maps_of(made.cross_attention)[:, :2], atol=0.05)


async def test_the_patches_of_an_image_have_boxes_in_its_own_pixels(serving):
    result = (await stub(serving).InspectImage(pb.InspectImageRequest(image=picture()))).result
    assert (result.patch_row_count, result.patch_column_count, len(result.patches)) == (4, 4, 17)
    assert maps_of(result.attention).shape == (8, 17, 17)
    class_token, first, *_, last = result.patches
    assert (class_token.right, class_token.bottom) == (0, 0)
    assert 0 <= first.left < first.right <= last.left < last.right <= 40
    assert 0 <= first.top < first.bottom <= last.top < last.bottom <= 20


async def test_embedders_are_inspected_too(serve, tmp_path):
    for name in ("cifar10-dino", "clip-text"):
        (tmp_path / name).symlink_to(SHIPPED / name)
    async with serve(tmp_path) as serving:
        patches = (await stub(serving).InspectImage(pb.InspectImageRequest(image=picture()))).result
        tokens = (await stub(serving).InspectText(pb.InspectTextRequest(text=TEXT))).result
    assert (patches.patch_row_count, patches.patch_column_count, len(patches.patches)) == (8, 8, 65)
    assert patches.attention.row_count == 65
    assert "".join(TEXT[token.span.start : token.span.end].strip() for token in tokens.tokens) == TEXT.replace(" ", "")
    assert tokens.attention.row_count == len(tokens.tokens)


async def test_the_weights_of_a_call_are_bounded_and_the_error_says_how_many_there_would_be(serve, tiny_store):
    text = "practice makes perfect. " * 6
    async with serve(tiny_store, max_attention_mib=1) as serving:
        small = pb.InspectGenerationRequest(text=text, attention=pb.AttentionOptions(layers=[0, 1]))
        assert (await stub(serving).InspectGeneration(small)).result.attention.row_count == 144
        serving.host.models[1]._inspector._max_bytes = 600_000  # of 663,552
        failure = await failure_of(stub(serving).InspectGeneration(small))
        assert (failure.code, failure.field) == (grpc.StatusCode.INVALID_ARGUMENT, "text")
        assert "2 layers x 4 heads x 144 x 144 tokens" in failure.message
        assert "max_attention_mib" in failure.message
        small.attention.layers.pop()
        assert (await stub(serving).InspectGeneration(small)).result.attention.row_count == 144


async def test_wrong_requests_name_the_field_and_the_range(serving):
    for request, field, word in (
        (pb.InspectTextRequest(), "text", "empty"),
        (pb.InspectTextRequest(text=TEXT, text_pair=TEXT), "text_pair", "single texts"),
        (pb.InspectTextRequest(text="the " * 50), "text", "at most 40"),
        (pb.InspectTextRequest(text=TEXT, attention=pb.AttentionOptions(layers=[2])), "attention.layers[0]", "0 to 1"),
        (pb.InspectTextRequest(text=TEXT, attention=pb.AttentionOptions(heads=[9])), "attention.heads[0]", "0 to 3"),
        (pb.InspectTextRequest(text=TEXT, attention=pb.AttentionOptions(summary=7)), "attention.summary", "is 7"),
        (pb.InspectTextRequest(text=TEXT, attention=pb.AttentionOptions(heads=[0] * 1025)), "attention.heads", "1024"),
    ):
        failure = await failure_of(stub(serving).InspectText(request))
        assert (failure.code, failure.field) == (grpc.StatusCode.INVALID_ARGUMENT, field)
        assert word in failure.message
    failure = await failure_of(stub(serving).InspectImage(pb.InspectImageRequest(image=b"no image")))
    assert (failure.code, failure.field) == (grpc.StatusCode.INVALID_ARGUMENT, "image")
    failure = await failure_of(stub(serving).InspectText(pb.InspectTextRequest(text=TEXT, model="tiny-images")))
    assert failure.code is grpc.StatusCode.FAILED_PRECONDITION


async def test_a_long_text_is_cut_where_that_is_allowed(serving):
    response = await stub(serving).InspectText(pb.InspectTextRequest(text="the " * 50, truncate=True))
    assert (response.result.truncated, response.result.attention.row_count) == (True, 40)
    response = await stub(serving).InspectGeneration(pb.InspectGenerationRequest(text="a" * 200 + "b", truncate=True))
    assert (response.result.truncated, response.result.tokens[-1].text) == (True, "b")


async def test_a_bundle_without_the_graph_says_how_to_get_one(serve, classifier_store):
    async with serve(classifier_store) as serving:
        failure = await failure_of(stub(serving).InspectText(pb.InspectTextRequest(text=TEXT, model="topics")))
        assert (failure.code, failure.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "NO_ATTENTION")
        assert "--attention" in failure.message
        failure = await failure_of(stub(serving).InspectText(pb.InspectTextRequest(text=TEXT)))
        assert failure.code is grpc.StatusCode.FAILED_PRECONDITION


async def test_the_graph_is_opened_once_at_first_use_and_closed_with_the_model(serving):
    (inspector,) = (m._inspector for m in serving.host.models if m.bundle.manifest.name == "tiny-classification")
    await serving.texts.ClassifyText(texts_pb.ClassifyTextRequest(texts=[TEXT]))
    assert inspector._batcher is None
    first, *others = await asyncio.gather(
        *(stub(serving).InspectText(pb.InspectTextRequest(text=TEXT)) for _ in range(8))
    )
    batcher = inspector._batcher
    assert batcher is not None
    assert all(other.result == first.result for other in others)
    await asyncio.to_thread(serving.host.close)
    assert not batcher.is_alive
