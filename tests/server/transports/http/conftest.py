"""Servers with an HTTP port in this process: a tiny decoder with a chat template, and a classifier that embeds."""

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import pytest
from edge import make_application
from tiny_engine import EOS_ID, MAX_LENGTH, byte_tokenizer, make_chat_template, make_decoder, make_generation_model

from headway_server.monitoring.metrics import Metrics
from headway_server.observers import Call, Observer, joined
from headway_server.runtime import Runtime
from headway_server.services.application import Application
from headway_server.serving.host import ModelHost
from headway_server.settings import ServerSettings
from headway_server.transports.http import HttpServer

TEMPLATE = "{% for message in messages %}<bos>{{ message.role }}: {{ message.content }}\n{% endfor %}<bos>assistant:"


class Recorder(Observer):
    """Keeps how calls have ended."""

    def __init__(self) -> None:
        self.finished: list[tuple[str, str]] = []
        self.calls: list[Call] = []

    def call_finished(self, call, *, error, duration_s):  # noqa: ARG002 (the observer's)
        self.calls.append(call)
        self.finished.append((call.method, type(error).__name__))


@dataclass(frozen=True, kw_only=True)
class Serving:
    """A server, and a client of its HTTP port."""

    server: Application
    http: HttpServer
    host: ModelHost
    decoder: Any
    recorder: Recorder
    grpc_port: int
    client: httpx2.AsyncClient

    @property
    def port(self) -> int:
        return self.server.ports[1]

    @property
    def url(self) -> str:
        return str(self.client.base_url)


Serve = Callable[..., AbstractAsyncContextManager[Serving]]


@pytest.fixture
def serve(classifier_store: Path, runtime: Runtime, tmp_path: Path) -> Serve:
    """Starts a server with settings of the test's own, and stops it."""

    @asynccontextmanager
    async def start(
        *,
        verify: Any = False,
        num_slots: int = 4,
        template: str = TEMPLATE,
        special: tuple[str, ...] = (),
        max_length: int = MAX_LENGTH,
        **options: Any,
    ) -> AsyncIterator[Serving]:
        settings = ServerSettings(store=options.pop("store", classifier_store), port=0, http_port=0, **options)
        recorder, metrics = Recorder(), Metrics()
        observer = joined((recorder, metrics))
        vocab_size = byte_tokenizer(special).get_vocab_size()
        decoder = make_decoder(num_slots=num_slots, max_length=max_length, vocab_size=vocab_size)
        decoder.output[:, EOS_ID] = 0  # so that texts do not end by themselves
        model = make_generation_model(
            decoder,
            chat_template=make_chat_template(tmp_path, template, special=special),
            special=special,
            max_input_tokens=max_length * 5 // 8,
            max_total_tokens=max_length,
        )
        host = ModelHost([*ModelHost.open(runtime, settings, observer=observer).models, model])
        server = make_application(host, settings, observer=observer)
        http = HttpServer(server, write_metrics=metrics.write)
        server.doors.append(http)
        port = await server.start()
        scheme = "https" if settings.tls_files else "http"
        base = f"{scheme}://127.0.0.1:{server.ports[1]}"
        try:
            async with httpx2.AsyncClient(base_url=base, verify=verify, timeout=30) as client:
                yield Serving(
                    server=server,
                    http=http,
                    host=host,
                    decoder=decoder,
                    recorder=recorder,
                    grpc_port=port,
                    client=client,
                )
        finally:
            if http.is_open:
                assert await server.stop()
        assert server.calls.num_running == 0

    return start
