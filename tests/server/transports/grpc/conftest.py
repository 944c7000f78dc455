"""A server of every task in a thread of this process, and the real Triton client in a process of its own."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import tiny_bundles
import tiny_tagger
from edge import make_application
from numpy_decoder import NumpyEncoder
from tiny_engine import (
    EOS_ID,
    VOCAB_SIZE,
    make_bundle,
    make_chat_template,
    make_decoder,
    make_generation_model,
    make_parts,
    make_translation_model,
)
from triton_client import triton_process

from headway_server.bundles import CHAT_TEMPLATE_FILE, BundleFile, Scoring, Task
from headway_server.observers import Observer, joined
from headway_server.runtime import Runtime
from headway_server.services import Statistics
from headway_server.services.application import Application
from headway_server.serving.host import ModelHost
from headway_server.settings import ServerSettings
from headway_server.tasks.generation.model import GenerationModel

TEMPLATE = "{% for message in messages %}<bos>{{ message.role }}: {{ message.content }}\n{% endfor %}<bos>assistant:"


class Recorder(Observer):
    """Keeps how calls have ended."""

    def __init__(self) -> None:
        self.finished: list[tuple[str, str, str]] = []

    def call_finished(self, call, *, error, duration_s):  # noqa: ARG002 (the observer's)
        name = "" if call.model is None else call.model.name
        self.finished.append((call.method.rpartition("/")[2], name, type(error).__name__))


@dataclass(frozen=True, kw_only=True)
class Served:
    """The server."""

    port: int
    host: ModelHost
    server: Application
    recorder: Recorder
    loop: asyncio.AbstractEventLoop

    def run(self, coroutine: Any) -> Any:
        """Runs a coroutine on the server's event loop."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(30)


def _endless(decoder: Any) -> Any:
    decoder.output[:, EOS_ID] = 0  # some of 300 logits is always above 0
    return decoder


def _make_chat_model(template: Any) -> GenerationModel:
    """A model whose bundle says that it continues conversations."""
    bundle = make_bundle(Task.GENERATION)
    files = bundle.manifest.files | {CHAT_TEMPLATE_FILE: BundleFile(sha256="0" * 64, size_bytes=1)}
    manifest = bundle.manifest.model_copy(update={"name": "tiny-chat", "files": files})
    bundle = replace(bundle, manifest=manifest)
    return GenerationModel(bundle, make_parts([_endless(make_decoder())]), chat_template=template)


@pytest.fixture(scope="session")
def serve_in_thread() -> Iterator[Callable[..., Served]]:
    """Starts servers, each in a thread with an event loop, and stops them at the end."""
    started: list[Served] = []

    def start(make_host: Callable[[Observer], ModelHost], settings: ServerSettings) -> Served:
        recorder, statistics = Recorder(), Statistics()
        observer = joined((recorder, statistics))
        loop, ready = asyncio.new_event_loop(), threading.Event()
        parts: dict[str, Any] = {}

        async def run() -> None:
            parts["host"] = make_host(observer)
            parts["server"] = make_application(parts["host"], settings, observer=observer, statistics=statistics)
            parts["port"] = await parts["server"].start()
            ready.set()

        def work() -> None:
            loop.run_until_complete(run())
            loop.run_forever()

        threading.Thread(target=work, daemon=True).start()
        assert ready.wait(60)
        served = Served(**parts, recorder=recorder, loop=loop)
        started.append(served)
        return served

    yield start
    for served in started:
        if not served.server.calls.is_draining:
            assert served.run(served.server.stop())
        served.loop.call_soon_threadsafe(served.loop.stop)


@pytest.fixture(scope="session")
def served(
    serve_in_thread: Callable[..., Served], runtime: Runtime, tmp_path_factory: pytest.TempPathFactory
) -> Served:
    """A server of one model or more of each task."""
    store = tmp_path_factory.mktemp("oip")
    tiny_bundles.write_topic_bundle(store)
    tiny_bundles.write_topic_bundle(store, name="pairs", text_pairs="optional", has_token_types=True)
    tiny_bundles.write_colour_bundle(store)
    tiny_bundles.write_colour_bundle(store, name="hues", task=Task.IMAGE_EMBEDDING)
    tiny_bundles.write_topic_bundle(store, name="vectors", task=Task.TEXT_EMBEDDING, prompts={"query": "goal "})
    scoring = Scoring(activation="sigmoid")
    tiny_bundles.write_topic_bundle(
        store, name="scorer", task=Task.TEXT_SCORING, num_labels=1, scoring=scoring, text_pairs="optional"
    )
    tiny_tagger.write_tagger_bundle(store)
    settings = ServerSettings(store=store, port=0, max_image_outputs_mib=0)  # every call is computed and counted

    def make_host(observer: Observer) -> ModelHost:
        template = make_chat_template(tmp_path_factory.mktemp("template"), TEMPLATE)
        return ModelHost(
            [
                *ModelHost.open(runtime, settings, observer=observer).models,
                make_generation_model(_endless(make_decoder()), observer=observer),
                _make_chat_model(template),
                make_translation_model(make_decoder(), NumpyEncoder(vocab_size=VOCAB_SIZE), observer=observer),
            ]
        )

    return serve_in_thread(make_host, settings)


@pytest.fixture(scope="session")
def triton_calls() -> Iterator[Callable[..., Any]]:
    with triton_process() as call:
        yield call


@pytest.fixture
def triton(triton_calls: Callable[..., Any], served: Served) -> Callable[..., Any]:
    """Calls the server by functions of `triton_client.py`."""
    return lambda name, *args, **options: triton_calls(served.port, name, *args, **options)
