"""Several labels, pairs of texts, thresholds, temperatures and embeddings, over gRPC, on models known by hand."""

import itertools
from io import BytesIO
from pathlib import Path

import grpc
import numpy as np
import pytest
import tiny_bundles
import tiny_tagger
from PIL import Image
from rpc_failures import failure_of

from headway.v1 import embedding_service_pb2 as embedding_pb
from headway.v1 import text_classification_service_pb2 as pb
from headway_server.bundles import ClassificationScheme

SEVERAL = ClassificationScheme(kind="multi_label", temperature=2.0, thresholds=(0.9, 0.6, 0.4))


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Topics with one label, several, of pairs, of pairs alone, and without embeddings; images' colours; names."""
    store = tmp_path_factory.mktemp("variety")
    write = tiny_bundles.write_topic_bundle
    write(store, name="single", classification=ClassificationScheme(temperature=2.0))
    write(store, name="several", classification=SEVERAL)
    write(store, name="pairs", text_pairs="optional", has_token_types=True)
    write(store, name="only-pairs", text_pairs="required")
    write(store, name="plain", offers_embeddings=False)
    tiny_bundles.write_colour_bundle(store)
    tiny_tagger.write_tagger_bundle(store)
    return store


@pytest.fixture
async def serving(serve, store):
    async with serve(store) as serving:
        yield serving


def logits(*words: str, weights: tuple[float, ...] | None = None) -> np.ndarray:
    """Of the topic model, by its definition: every text begins with a token that means nothing."""
    vectors = np.zeros((len(words), 3))
    for row, word in enumerate(words):
        for topic, members in enumerate(tiny_bundles.TOPICS.values()):
            if word in members:
                vectors[row, topic] = 2 + members.index(word)
    return np.average(vectors, axis=0, weights=weights) @ (np.eye(3) + 0.1)


def probabilities(labels) -> np.ndarray:
    by_name = {scored.label: scored.probability for scored in labels}
    return np.array([by_name[name] for name in tiny_bundles.TOPICS])


def selected(labels) -> set[str]:
    return {scored.label for scored in labels if scored.selected}


async def classify(serving, **fields):
    return (await serving.texts.ClassifyText(pb.ClassifyTextRequest(**fields))).results


async def test_logits_are_divided_by_the_temperature_before_the_softmax(serving):
    [result] = await classify(serving, model="single", texts=["goal atom team"])
    scaled = np.exp(logits("", "goal", "atom", "team") / 2)
    assert probabilities(result.labels) == pytest.approx(scaled / scaled.sum(), abs=1e-6)
    assert selected(result.labels) == {"sports"}


async def test_several_labels_have_probabilities_and_thresholds_of_their_own(serving):
    [result] = await classify(serving, model="several", texts=["team star"])
    expected = 1 / (1 + np.exp(-logits("", "team", "star") / 2))
    assert probabilities(result.labels) == pytest.approx(expected, abs=1e-6)
    passing = {name for name, p, t in zip(tiny_bundles.TOPICS, expected, SEVERAL.thresholds, strict=True) if p >= t}
    assert selected(result.labels) == passing == {"science", "business"}, "sports is as likely, and below its threshold"


async def test_a_threshold_of_the_request_takes_the_place_of_the_models(serving):
    for threshold, expected in ((0.0, set(tiny_bundles.TOPICS)), (0.6, {"sports", "science"}), (1.0, set())):
        [result] = await classify(serving, model="several", texts=["team star"], threshold=threshold)
        assert selected(result.labels) == expected
    for threshold, expected in ((0.0, {"sports"}), (0.5, {"sports"}), (0.99, set())):
        [result] = await classify(serving, model="single", texts=["team"], threshold=threshold)
        assert selected(result.labels) == expected


@pytest.mark.parametrize("threshold", [-0.1, 1.0000001, float("nan")])
async def test_a_threshold_that_is_no_probability_is_refused(serving, threshold):
    request = pb.ClassifyTextRequest(model="single", texts=["goal"], threshold=threshold)
    failure = await failure_of(serving.texts.ClassifyText(request))
    assert (failure.code, failure.field) == (grpc.StatusCode.INVALID_ARGUMENT, "threshold")
    assert f"is {request.threshold}; give a probability of 0 to 1" in failure.message
    assert "is 1;" not in failure.message, "what is just past the limit must not look like the limit"


async def test_a_pair_is_read_as_one_input_whose_second_text_is_known(serving):
    """Words of the second text weigh ten, so the order of the texts tells."""
    results = await classify(serving, model="pairs", texts=["team", "atom"], text_pairs=["atom", "team"])
    for result, words in zip(results, (("team", "atom"), ("atom", "team")), strict=True):
        expected = np.exp(logits("", words[0], "", words[1], weights=(1, 1, 10, 10)))
        assert probabilities(result.labels) == pytest.approx(expected / expected.sum(), abs=1e-5)
        assert result.token_count == 4
    assert selected(results[0].labels) != selected(results[1].labels)


async def test_a_model_of_optional_pairs_reads_single_texts_too(serving):
    [result] = await classify(serving, model="pairs", texts=["team atom"])
    expected = np.exp(logits("", "team", "atom"))
    assert probabilities(result.labels) == pytest.approx(expected / expected.sum(), abs=1e-6)


@pytest.mark.parametrize(
    ("model", "pairs", "message"),
    [
        ("single", ["goal"], "model single reads single texts; leave it out"),
        ("only-pairs", [], "model only-pairs reads pairs of texts; give one for every text"),
        ("pairs", ["goal", "goal"], "has 2 elements for 1 texts; give one for every text, or none"),
    ],
)
async def test_pairs_that_do_not_fit_the_model_are_refused(serving, model, pairs, message):
    for call, request in (
        (serving.texts.ClassifyText, pb.ClassifyTextRequest(model=model, texts=["goal"], text_pairs=pairs)),
        (serving.embeddings.EmbedText, embedding_pb.EmbedTextRequest(model=model, texts=["goal"], text_pairs=pairs)),
    ):
        failure = await failure_of(call(request))
        assert (failure.code, failure.field) == (grpc.StatusCode.INVALID_ARGUMENT, "text_pairs")
        assert message in failure.message


async def test_an_empty_second_text_is_refused_by_its_index(serving):
    request = pb.ClassifyTextRequest(model="pairs", texts=["goal", "goal"], text_pairs=["atom", ""])
    assert (await failure_of(serving.texts.ClassifyText(request))).field == "text_pairs[1]"


async def test_a_pair_past_the_limit_is_refused_or_loses_of_its_longer_text(serving):
    request = pb.ClassifyTextRequest(model="pairs", texts=["goal"], text_pairs=["atom " * 40])
    failure = await failure_of(serving.texts.ClassifyText(request))
    assert failure.field == "texts[0]"
    assert "has 43 tokens with the text it is paired with, the model reads at most 32" in failure.message
    request.truncate = True
    [result] = (await serving.texts.ClassifyText(request)).results
    assert (result.token_count, result.truncated) == (32, True)
    expected = np.exp(logits("", "goal", *["", *["atom"] * 29], weights=(1, 1, *[10] * 30)))
    assert probabilities(result.labels) == pytest.approx(expected / expected.sum(), abs=1e-5)


async def test_an_embedding_is_the_models_vector_and_has_length_1_unless_asked_otherwise(serving):
    request = embedding_pb.EmbedTextRequest(model="single", texts=["goal atom", "bank"])
    response = await serving.embeddings.EmbedText(request)
    vectors = np.array([result.values for result in response.results])
    expected = np.array([[2, 2, 0], [0, 0, 2]]) / np.array([[3], [2]])
    assert vectors == pytest.approx(expected / np.linalg.norm(expected, axis=1, keepdims=True), abs=1e-6)
    assert [result.token_count for result in response.results] == [3, 2]
    assert response.model.name == "single"
    request.normalize = False
    plain = np.array([result.values for result in (await serving.embeddings.EmbedText(request)).results])
    assert plain == pytest.approx(expected, abs=1e-6)


async def test_a_token_classifier_answers_vectors_and_spans_from_the_same_batches(serving):
    """The vector is the mean of what the words are, the first token that means nothing included."""
    generator = np.random.default_rng(11)
    words = list(tiny_tagger.WORDS)
    texts = [" ".join(generator.choice(words, generator.integers(1, 15))) for _ in range(60)]
    requests = [embedding_pb.EmbedTextRequest(model="tagger", texts=[text], normalize=False) for text in texts]
    alone = [await serving.texts.ClassifyTokens(pb.ClassifyTokensRequest(texts=[text])) for text in texts]
    embedding = [serving.embeddings.EmbedText(request) for request in requests]
    tagging = [serving.texts.ClassifyTokens(pb.ClassifyTokensRequest(texts=[text])) for text in texts]
    for text, vectors, spans, before in zip(texts, embedding, tagging, alone, strict=True):
        [result] = (await vectors).results
        columns = [tiny_tagger.WORDS[word] for word in text.split()]
        expected = tiny_tagger.STRENGTH * np.bincount(columns, minlength=4) / (1 + len(columns))
        assert np.array(result.values) == pytest.approx(expected, abs=1e-6)
        assert result.token_count == 1 + len(columns)
        assert (await spans).results == before.results
    assert sum(len(response.results[0].spans) for response in alone) > 60


async def test_without_a_name_texts_are_embedded_by_the_only_classifier_of_texts_or_else_of_tokens(serve, tmp_path):
    tiny_tagger.write_tagger_bundle(tmp_path)
    request = embedding_pb.EmbedTextRequest(texts=["Ada"])
    async with serve(tmp_path) as serving:
        assert (await serving.embeddings.EmbedText(request)).model.name == "tagger"
    tiny_bundles.write_topic_bundle(tmp_path)
    async with serve(tmp_path) as serving:
        assert (await serving.embeddings.EmbedText(request)).model.name == "topics"


async def test_a_vector_of_zeros_stays_one(serving):
    [result] = (
        await serving.embeddings.EmbedText(embedding_pb.EmbedTextRequest(model="single", texts=["unheard"]))
    ).results
    assert list(result.values) == [0.0, 0.0, 0.0]


async def test_a_model_without_embeddings_names_those_that_have_them(serving):
    failure = await failure_of(
        serving.embeddings.EmbedText(embedding_pb.EmbedTextRequest(model="plain", texts=["goal"]))
    )
    assert (failure.code, failure.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "WRONG_TASK")
    assert "cannot embed texts; ask only-pairs, pairs, several, single, tagger" in failure.message
    failure = await failure_of(
        serving.embeddings.EmbedText(embedding_pb.EmbedTextRequest(model="colours", texts=["goal"]))
    )
    assert "colours/1 is for image_classification and cannot embed texts" in failure.message
    failure = await failure_of(serving.embeddings.EmbedText(embedding_pb.EmbedTextRequest(texts=["goal"])))
    assert (failure.code, failure.field) == (grpc.StatusCode.INVALID_ARGUMENT, "model")
    failure = await failure_of(
        serving.embeddings.EmbedImage(embedding_pb.EmbedImageRequest(model="single", images=[b"x"]))
    )
    assert "cannot embed images; ask colours" in failure.message


async def test_where_nothing_offers_embeddings_the_call_is_refused(serve, tmp_path):
    tiny_bundles.write_topic_bundle(tmp_path, offers_embeddings=False)
    async with serve(tmp_path) as serving:
        for model in ("", "topics"):
            failure = await failure_of(
                serving.embeddings.EmbedText(embedding_pb.EmbedTextRequest(model=model, texts=["goal"]))
            )
            assert failure.code is grpc.StatusCode.FAILED_PRECONDITION
            assert "no loaded model" in failure.message


async def test_images_are_embedded(serving):
    images = []
    for colour in ((255, 0, 0), (0, 0, 255)):
        buffer = BytesIO()
        Image.new("RGB", (20, 10), colour).save(buffer, "PNG")
        images.append(buffer.getvalue())
    request = embedding_pb.EmbedImageRequest(images=images, normalize=False)
    response = await serving.embeddings.EmbedImage(request)
    vectors = np.array([result.values for result in response.results])
    assert vectors == pytest.approx(np.array([[4.0, -4, -4], [-4, -4, 4]]), abs=1e-5)
    assert [(result.width, result.height) for result in response.results] == [(20, 10), (20, 10)]
    request.ClearField("normalize")
    scaled = np.array([result.values for result in (await serving.embeddings.EmbedImage(request)).results])
    assert np.linalg.norm(scaled, axis=1) == pytest.approx(1)
    failure = await failure_of(serving.embeddings.EmbedImage(embedding_pb.EmbedImageRequest()))
    assert failure.field == "images"


async def test_the_answer_is_the_same_alone_and_in_any_batch_of_both_kinds(serving):
    """Labels and embeddings of the same model run together, in batches drawn at random."""
    generator = np.random.default_rng(7)
    words = [word for members in tiny_bundles.TOPICS.values() for word in members]
    texts = [" ".join(generator.choice(words, generator.integers(1, 31))) for _ in range(60)]

    async def alone(text):
        [labels] = await classify(serving, model="single", texts=[text])
        [vector] = (
            await serving.embeddings.EmbedText(embedding_pb.EmbedTextRequest(model="single", texts=[text]))
        ).results
        return probabilities(labels.labels), np.array(vector.values)

    expected = {text: await alone(text) for text in texts}
    for _ in range(5):
        cuts = sorted(generator.choice(np.arange(1, 60), 12, replace=False).tolist())
        parts = [texts[a:b] for a, b in itertools.pairwise([0, *cuts, 60])]
        labelling = [serving.texts.ClassifyText(pb.ClassifyTextRequest(model="single", texts=part)) for part in parts]
        embedding = [
            serving.embeddings.EmbedText(embedding_pb.EmbedTextRequest(model="single", texts=part)) for part in parts
        ]
        for part, labels, vectors in zip(parts, labelling, embedding, strict=True):
            answers = zip(part, (await labels).results, (await vectors).results, strict=True)
            for text, labelled, embedded in answers:
                assert probabilities(labelled.labels) == pytest.approx(expected[text][0], abs=1e-5)
                assert np.array(embedded.values) == pytest.approx(expected[text][1], abs=1e-5)
