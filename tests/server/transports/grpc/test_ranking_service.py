"""RankingService through a real channel: candidates of one kind, in the order of their cosines to a query."""

import shutil
from io import BytesIO

import grpc
import numpy as np
import pytest
import tiny_bundles
from PIL import Image
from rpc_failures import failure_of

from headway.v1 import image_service_pb2 as images_pb
from headway.v1 import image_service_pb2_grpc as images_grpc
from headway.v1 import ranking_service_pb2 as pb
from headway.v1 import ranking_service_pb2_grpc as pb_grpc
from headway_server.bundles import Scoring, Task
from headway_server.errors import InvalidInputError
from headway_server.tasks.ranking import rank


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranking")
    tiny_bundles.write_colour_bundle(folder, name="hues", task=Task.IMAGE_EMBEDDING)
    tiny_bundles.write_topic_bundle(folder, name="vectors", task=Task.TEXT_EMBEDDING, prompts={"query": "goal "})
    return folder


@pytest.fixture
async def ranking(serve, store):
    async with serve(store) as serving:
        stub = pb_grpc.RankingServiceStub(serving.channel)
        stub.serving = serving
        yield stub


def encoded(colour) -> bytes:
    file = BytesIO()
    Image.new("RGB", (8, 8), colour).save(file, "PNG")
    return file.getvalue()


def order(answer) -> list[int]:
    return [result.index for result in answer.results]


COLOURS = [(0, 0, 255), (250, 40, 0), (255, 0, 0), (0, 255, 0)]


async def test_images_are_ranked_by_an_image(ranking):
    images = [encoded(colour) for colour in COLOURS]
    answer = await ranking.RankImages(pb.RankImagesRequest(query_image=encoded((255, 0, 0)), images=images))
    assert order(answer)[:2] == [2, 1]
    assert answer.results[0].score == pytest.approx(1, abs=1e-6)
    assert [result.score for result in answer.results] == sorted(
        (result.score for result in answer.results), reverse=True
    )
    assert answer.model.name == "hues"
    prepare = images_grpc.ImageServiceStub(ranking.serving.channel).PrepareImage
    prepared = await prepare(images_pb.PrepareImageRequest(images=images))
    ids = [result.image_id for result in prepared.results]
    by_id = await ranking.RankImages(pb.RankImagesRequest(query_image_id=ids[2], image_ids=ids * 30, top_k=31))
    assert order(by_id) == [2 + 4 * number for number in range(30)] + [1], "of equal ones the earlier comes first"


async def test_texts_are_ranked_by_a_text_and_a_set_that_comes_again_is_kept(ranking):
    texts = ["star", "goal", "goal atom", "market"] * 100
    for _ in range(2):
        answer = await ranking.RankTexts(pb.RankTextsRequest(query_text="goal", texts=texts, top_k=2))
        assert order(answer) == [1, 5]
    model = next(model for model in ranking.serving.host.models if model.bundle.manifest.name == "vectors")
    assert model.usage().caches[0][2:] == (1, 1)
    prompted = await ranking.RankTexts(pb.RankTextsRequest(query_text="atom", query_prompt_name="query", texts=texts))
    assert order(prompted)[0] == 2
    prompted = await ranking.RankTexts(pb.RankTextsRequest(query_text="goal atom", prompt_name="query", texts=["atom"]))
    assert prompted.results[0].score == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize(
    ("method", "fields", "code", "message"),
    [
        ("RankImages", {"images": [b"x"]}, "INVALID_ARGUMENT", "query_text: is not set; give it, or query_image"),
        ("RankImages", {"query_image": b"x", "images": [encoded("red")]}, "INVALID_ARGUMENT", "query_image: is not an"),
        ("RankImages", {"query_image": encoded("red")}, "INVALID_ARGUMENT", "images: is empty"),
        ("RankImages", {"query_image_id": "a", "images": [encoded("red")]}, "NOT_FOUND", "query_image_id: no image"),
        (
            "RankImages",
            {"query_image": encoded("red"), "image_ids": ["a"] * 1025},
            "INVALID_ARGUMENT",
            "image_ids: has 1025 elements, the limit is 1024",
        ),
        (
            "RankImages",
            {"query_text": "red", "images": [encoded("red")]},
            "FAILED_PRECONDITION",
            "no loaded model can rank images by a text, as no model that can embed texts in its space is loaded",
        ),
        ("RankTexts", {"query_text": "goal"}, "INVALID_ARGUMENT", "texts: is empty"),
        ("RankTexts", {"query_text": "", "texts": ["a"]}, "INVALID_ARGUMENT", "query_text: is empty"),
        ("RankTexts", {"query_text": "goal", "texts": ["goal", ""]}, "INVALID_ARGUMENT", "texts[1]: is empty"),
        ("RankTexts", {"query_text": "goal", "texts": ["a"] * 4097}, "INVALID_ARGUMENT", "texts: has 4097 elements"),
        ("RankTexts", {"query_text": "goal", "texts": ["star"], "top_k": 2}, "INVALID_ARGUMENT", "top_k: is 2 of 1"),
        ("RankTexts", {"query_text": "a", "texts": ["a"], "prompt_name": "x"}, "INVALID_ARGUMENT", "prompt_name: is"),
        (
            "RankTexts",
            {"query_image": encoded("red"), "texts": ["a"]},
            "FAILED_PRECONDITION",
            "no loaded model can rank texts by an image, as no model that can embed images in its space is loaded",
        ),
    ],
)
async def test_what_cannot_be_ranked_is_refused_with_a_sentence(ranking, method, fields, code, message):
    failure = await failure_of(getattr(ranking, method)(getattr(pb, f"{method}Request")(**fields)))
    assert failure.code is getattr(grpc.StatusCode, code)
    assert message in failure.message


def test_a_place_is_asked_for_that_there_is():
    scores = np.array([0, 1, 0], np.float32)
    assert [one.index for one in rank(scores, 0)] == [1, 0, 2]
    with pytest.raises(InvalidInputError, match="top_k: is -1 of 3 candidates"):
        rank(scores, -1)


async def test_a_cross_encoder_ranks_texts_by_the_scores_of_its_pairs(serve, store, tmp_path):
    folder = tmp_path / "store"
    shutil.copytree(store, folder)
    scorer = {
        "task": Task.TEXT_SCORING,
        "num_labels": 1,
        "has_token_types": True,
        "scoring": Scoring(activation="sigmoid"),
    }
    tiny_bundles.write_topic_bundle(folder, name="reranker", text_pairs="required", **scorer)
    tiny_bundles.write_topic_bundle(folder, name="regression", text_pairs="never", **scorer)
    texts = ["star", "goal", "goal atom", "market"] * 65  # more than one call of its own takes
    async with serve(folder) as serving:
        stub = pb_grpc.RankingServiceStub(serving.channel)
        answer = await stub.RankTexts(pb.RankTextsRequest(query_text="goal", texts=texts))
        assert answer.model.name == "reranker", "before an embedder"
        scores = []
        for start in range(0, len(texts), 130):
            request = pb.ScoreTextRequest(model="reranker", texts=["goal"], text_pairs=texts[start : start + 130])
            scores += [result.score for result in (await stub.ScoreText(request)).results]
        assert order(answer) == sorted(range(len(texts)), key=lambda index: -scores[index])
        assert [result.score for result in answer.results] == pytest.approx(sorted(scores, reverse=True), abs=1e-6)
        best = await stub.RankTexts(pb.RankTextsRequest(query_text="goal", texts=texts, top_k=3))
        assert list(best.results) == list(answer.results)[:3]
        by_cosine = await stub.RankTexts(pb.RankTextsRequest(model="vectors", query_text="goal", texts=texts))
        assert by_cosine.results[0].score == pytest.approx(1, abs=1e-6)
        for fields, message in (
            ({"texts": ["a"], "query_prompt_name": "query"}, "query_prompt_name: is set, and model reranker"),
            ({"texts": ["a"], "prompt_name": "query"}, "prompt_name: is set, and model reranker"),
            ({"texts": ["a", ""]}, "texts[1]: is empty"),
            ({"texts": []}, "texts: is empty"),
            ({"texts": ["a"] * 4097}, "texts: has 4097 elements"),
            ({"texts": ["star", "goal " * 500]}, "texts[1]: has 5"),
            ({"texts": ["a"], "top_k": 2}, "top_k: is 2 of 1"),
            (
                {"texts": ["a"], "model": "regression"},
                "regression/1 is for text_scoring and cannot rank texts by a text",
            ),
        ):
            failure = await failure_of(stub.RankTexts(pb.RankTextsRequest(query_text="goal", **fields)))
            assert message in failure.message
