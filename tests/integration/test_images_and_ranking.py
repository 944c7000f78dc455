"""Images by id and rankings, from both clients and the command line, of a model of two towers."""

import asyncio
import io
import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from headway_client import AsyncClient, Client, InvalidArgumentError, NotFoundError
from headway_client.cli import app

TEXTS = ["a red wall", "two dogs", "the sea", "green grass", "a blue house"]


@pytest.fixture(scope="module")
def images(towers: Path) -> list[bytes]:
    with np.load(towers / "evaluation.npz") as arrays:
        return [encoded(image) for image in arrays["images"]]


def encoded(image: np.ndarray) -> bytes:
    file = io.BytesIO()
    Image.fromarray(image).save(file, "PNG")
    return file.getvalue()


def expected_order(query: np.ndarray, candidates: np.ndarray) -> tuple[list[int], np.ndarray]:
    cosines = candidates @ query
    order = np.argsort(-cosines, kind="stable")
    return order.tolist(), cosines[order]


@pytest.mark.parametrize("query", ["query_text", "query_image", "query_image_id"])
def test_candidates_of_either_kind_are_ranked_by_a_query_of_either_kind(
    towers_client: Client, images: list[bytes], query: str
) -> None:
    client = towers_client
    [prepared] = client.prepare_image(images[0])
    value = {"query_text": "two dogs", "query_image": images[0], "query_image_id": prepared.image_id}[query]
    vector = (client.embed_text("two dogs") if query == "query_text" else client.embed_image(images[0])).to_numpy()[0]
    for answer, vectors in (
        (client.rank_images(images, **{query: value}), client.embed_image(images)),
        (client.rank_texts(TEXTS, **{query: value}), client.embed_text(TEXTS)),
    ):
        order, cosines = expected_order(vector, vectors.to_numpy())
        assert [result.index for result in answer] == order
        np.testing.assert_allclose([result.score for result in answer], cosines, atol=1e-5)
        assert answer.model.name == ("tiny-clip-image" if len(order) == len(images) else "tiny-clip-text")


def test_both_clients_name_images_by_id(towers_client: Client, images: list[bytes]) -> None:
    ids = [result.image_id for result in towers_client.prepare_image(images, model="tiny-clip-image")]
    labels = {"candidate_labels": TEXTS, "templates": ["{}", "a picture of {}"]}

    async def ask() -> tuple[object, ...]:
        async with AsyncClient(towers_client.server) as other:
            named = [result.image_id for result in await other.prepare_image(images)]
            assert named == ids
            return (
                (await other.embed_image(image_ids=ids)).results,
                (await other.classify_image(image_ids=ids, **labels)).results,
                (await other.rank_images(image_ids=ids, query_text="the sea", top_k=2)).results,
                (await other.rank_texts(TEXTS, query_image=images[1], top_k=1)).results,
            )

    found = (
        towers_client.embed_image(images).results,
        towers_client.classify_image(images, **labels).results,
        towers_client.rank_images(images, query_text="the sea", top_k=2).results,
        towers_client.rank_texts(TEXTS, query_image_id=ids[1], top_k=1).results,
    )
    assert asyncio.run(ask()) == found
    assert len(towers_client.embed_image(image_ids=ids * 30).results) == 120, "in as many calls as it takes"
    with pytest.raises(NotFoundError, match="PrepareImage again"):
        towers_client.embed_image(image_ids=["0" * 32])
    with pytest.raises(InvalidArgumentError, match=r"image_ids:? is set together with images"):
        towers_client.classify_image(images, image_ids=ids, **labels)
    for queries in ({}, {"query_text": "a", "query_image": images[0]}):
        with pytest.raises(ValueError, match="give one of query_text, query_image and query_image_id"):
            towers_client.rank_texts(TEXTS, **queries)


def test_the_commands_print_ids_and_rankings(towers_client: Client, images: list[bytes], tmp_path: Path) -> None:
    def run(*arguments: str) -> list[str]:
        ended = CliRunner().invoke(app, [*arguments, "--server", towers_client.server])
        assert ended.exit_code == 0, ended.output
        return ended.stdout.splitlines()

    files = [str(tmp_path / f"{number}.png") for number in range(len(images))]
    for file, image in zip(files, images, strict=True):
        Path(file).write_bytes(image)
    ids = dict(reversed(line.split("\t")) for line in run("prepare-image", *files))
    assert list(ids) == files
    ranked = towers_client.rank_images(images, query_text="the sea")
    expected = [f"{result.score:.4f}\t{files[result.index]}" for result in ranked]
    assert run("rank-images", *files, "--query-text", "the sea") == expected
    flags = [part for image_id in ids.values() for part in ("--image-id", image_id)]
    lines = run("rank-images", *flags, "--query-text", "the sea", "--json")
    assert [json.loads(line)["input"] for line in lines] == [ids[files[result.index]] for result in ranked]
    lines = run("rank-texts", *TEXTS, "--query-image", files[0], "--top-k", "2")
    best = towers_client.rank_texts(TEXTS, query_image=files[0], top_k=2)
    assert [line.split("\t")[1] for line in lines] == [TEXTS[result.index] for result in best]


def test_a_thousand_labels_that_come_again_are_not_computed_again(towers_client: Client, images: list[bytes]) -> None:
    labels = [f"{first} {second}" for first in "abcdefghij" for second in range(100)]
    first, again = (towers_client.classify_image(images[0], candidate_labels=labels) for _ in range(2))
    assert again.results == first.results
    assert again.timings.inference_s == 0, "what the model made of the image is kept, too"
