"""A task that is no part of headway: declared here alone, and found at every door."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import tiny_bundles
from typer.testing import CliRunner

from headway_client import AsyncClient, InvalidArgumentError
from headway_client.cli import app
from headway_ray.placement import place
from headway_server.bundles import TASK_PARTS, TOKENIZER_FILE, Task, TaskParts, read_manifest
from headway_server.services.open_inference.parameters import Kind
from headway_server.services.open_inference.tasks import InferCall, TensorTask
from headway_server.services.open_inference.tensors import BYTES, Arrays, TensorSpec, decode_texts
from headway_server.serving.abilities import Ability
from headway_server.serving.families import Family
from headway_server.serving.host import read_store
from headway_server.settings import ServerSettings
from headway_server.tasks.table import EMBED_TEXTS, FAMILIES, RPCS, add_task
from headway_server.tasks.text.model import TextModel


class LetterCounter(TextModel):
    """Embeds texts, and counts their letters."""

    async def count(self, texts: Sequence[str], *, letter: str) -> list[int]:
        return [text.count(letter) if letter else sum(map(str.isalpha, text)) for text in texts]


async def infer(model: LetterCounter, call: InferCall) -> Arrays:
    texts = decode_texts("text", call.arrays["text"])
    counts = await model.count(texts, letter=call.parameters.get("letter", ""))
    return {"letter_count": np.array(counts, np.int64)}


COUNT_LETTERS: Ability[LetterCounter] = Ability(name="count_letters", words="count letters")
TENSORS = TensorTask(
    inputs=lambda _: (TensorSpec(name="text", datatype=BYTES, shape=(-1,)),),
    outputs=lambda _: (TensorSpec(name="letter_count", datatype="INT64", shape=(-1,)),),
    parameters={"letter": Kind.TEXT},
    max_rows=8,
    infer=infer,
)


@pytest.fixture
def task() -> Iterator[Task]:
    task = add_task(
        "letter_counting",
        TaskParts(needs=("embedding", "special_tokens", "limits.max_input_tokens"), files=(TOKENIZER_FILE,)),
        Family(
            loader=f"{__name__}:LetterCounter.load",
            made_for=(COUNT_LETTERS,),
            can=(EMBED_TEXTS,),
            tensors=f"{__name__}:TENSORS",
        ),
    )
    yield task
    del FAMILIES[task], TASK_PARTS[task]


@pytest.fixture
def store(task: Task, tmp_path: Path) -> Path:
    tiny_bundles.write_topic_bundle(tmp_path, name="counter", task=task)
    return tmp_path


def test_a_manifest_of_the_task_is_read_and_held_to_its_parts(task: Task, store: Path) -> None:
    manifest = read_manifest(store / "counter" / "1")
    assert manifest.task is task
    assert Task("letter_counting") is task
    assert type(manifest).model_validate_json(manifest.model_dump_json()) == manifest
    with pytest.raises(ValueError, match="embedding"):
        type(manifest).model_validate(manifest.model_dump() | {"embedding": None})


async def test_its_model_answers_what_it_can_do_at_every_door(serve, store: Path) -> None:
    async with serve(store=store) as serving:
        async with AsyncClient(f"localhost:{serving.grpc_port}") as client:
            [listed] = await client.list_models("letter_counting")
            assert (listed.name, listed.capabilities) == ("counter", ("count_letters", "embed_text"))
            assert [model.name for model in await client.list_models(capability="count_letters")] == ["counter"]
            embedded = await client.embed_text(["ball vote"])
            with pytest.raises(InvalidArgumentError, match="letter_counting"):
                await client.list_models("counting")
        command = ["list-models", "--task", "letter_counting", "--server", f"localhost:{serving.grpc_port}"]
        printed = await asyncio.to_thread(CliRunner().invoke, app, command)
        assert "counter" in printed.stdout
        answer = (await serving.client.post("/v1/embeddings", json={"model": "counter", "input": "ball vote"})).json()
        assert answer["data"][0]["embedding"] == pytest.approx(embedded.results[0].values)
        metadata = (await serving.client.get("/v2/models/counter")).json()
        assert [tensor["name"] for tensor in metadata["outputs"]] == ["letter_count"]
        tensors = {
            "inputs": [{"name": "text", "datatype": "BYTES", "shape": [2], "data": ["ball", "vote"]}],
            "parameters": {"letter": "l"},
        }
        counted = (await serving.client.post("/v2/models/counter/infer", json=tensors)).json()
        assert counted["outputs"][0]["data"] == [2, 0]
        refused = await serving.client.post("/v1/completions", json={"model": "counter", "prompt": "a"})
        assert "is for letter_counting and cannot generate text" in refused.json()["error"]["message"]


def test_ray_places_its_calls(store: Path) -> None:
    settings = ServerSettings(store=store)
    paths, routes = read_store(settings)
    placements = place(((path, read_manifest(store / path)) for path in paths), routes, settings)
    choice = placements.choose(RPCS["EmbedText"], {}.get)
    assert choice.refusal is None
    assert choice.placements == placements.all
