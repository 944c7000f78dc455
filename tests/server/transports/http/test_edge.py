"""The HTTP port itself: probes, metrics, ids, who is let in, what is read, and how it ends."""

import asyncio
import gzip
import json
import re
import socket
import ssl
import time
import zlib
from contextlib import suppress

import pytest
import trustme
from loop_turns import longest_turn
from tiny_engine import slow_down
from waiting import until

from headway_server import keys
from headway_server.errors import InvalidInputError
from headway_server.transports.http import edge
from headway_server.transports.http import server as http_server
from headway_server.transports.http.edge import check_elements

MODELS = "/v1/models"


@pytest.fixture
def make_key(tmp_path, capsys):
    def make(name, *scopes, **budget):
        flags = [part for scope in scopes for part in ("--scope", scope)]
        flags += [part for name, value in budget.items() for part in (f"--{name.replace('_', '-')}", str(value))]
        keys.main(["create", name, "--access-file", str(tmp_path / "access.toml"), *flags])
        return {"authorization": f"Bearer {capsys.readouterr().out.splitlines()[-1]}"}

    return make


async def raw(port: int, data: bytes, *, wait_s: float = 5.0) -> bytes:
    """Sends bytes, and returns what comes until the server closes the connection or is silent.

    It has `wait_s` for the first bytes of its answer, and a tenth of a second for more.
    """
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(data)
    answer = b""
    try:
        while part := await asyncio.wait_for(reader.read(65536), 0.1 if answer else wait_s):
            answer += part
    except TimeoutError:
        pass
    except ConnectionResetError:
        answer += b"reset"
    writer.close()
    return answer


async def test_probes_and_metrics_answer(serve):
    async with serve() as serving:
        for path in ("/livez", "/readyz"):
            answer = await serving.client.get(path)
            assert (answer.status_code, answer.text) == (200, "ok\n")
        assert (await serving.client.get("/metrics")).status_code == 200


@pytest.mark.parametrize(
    ("accept", "media_type", "end"),
    [
        ("", "text/plain; version=0.0.4; charset=utf-8", "\n"),
        ("*/*", "text/plain; version=0.0.4; charset=utf-8", "\n"),
        ("application/openmetrics-text; version=1.0.0", "application/openmetrics-text; version=1.0.0", "# EOF\n"),
    ],
)
@pytest.mark.parametrize("encoding", ["identity", "gzip", "deflate, gzip"])
async def test_metrics_come_in_the_form_that_a_scrape_accepts(serve, accept, media_type, end, encoding):
    async with serve() as serving:
        answer = await serving.client.get("/metrics", headers={"accept": accept, "accept-encoding": encoding})
    assert answer.headers["content-type"].startswith(media_type)
    assert answer.headers.get("content-encoding") == ("gzip" if "gzip" in encoding else None)
    assert answer.headers["vary"] == "accept, accept-encoding"
    assert "headway_build_info" in answer.text
    assert answer.text.endswith(end)
    assert answer.text.endswith("# EOF\n") is ("openmetrics" in accept)


COMPRESSED = {
    "gzip": gzip.compress,
    "deflate": zlib.compress,
    "GZIP": gzip.compress,
}


@pytest.mark.parametrize("encoding", COMPRESSED)
async def test_a_compressed_body_is_read(serve, encoding):
    body = json.dumps({"model": "topics", "input": "goal " * 9}).encode()
    headers = {"content-type": "application/json"}
    async with serve() as serving:
        plain = await serving.client.post("/v1/embeddings", content=body, headers=headers)
        headers |= {"content-encoding": encoding}
        read = await serving.client.post("/v1/embeddings", content=COMPRESSED[encoding](body), headers=headers)
    assert (read.status_code, read.json()) == (200, plain.json())


@pytest.mark.parametrize(
    ("encoding", "body", "status", "words"),
    [
        ("br", b"{}", 415, "is 'br'; send gzip or deflate, or the body uncompressed"),
        ("gzip", b"{}", 400, "request: is not compressed as content-encoding says"),
        ("gzip", gzip.compress(b"{}")[:-9], 400, "request: is compressed in part"),
        ("gzip", gzip.compress(b"{}") + b"{}", 400, "request: is compressed in part, or goes on behind"),
        ("gzip", gzip.compress(b" " * 2**25), 413, "bytes or more, the limit of this method is"),
        ("deflate", zlib.compress(b" " * 2**25), 413, "bytes or more, the limit of this method is"),
    ],
    ids=["unknown", "plain", "cut off", "goes on", "large gzip", "large deflate"],  # gzip has the time in it
)
async def test_a_body_that_is_compressed_wrongly_or_too_well_is_refused(serve, encoding, body, status, words):
    headers = {"content-type": "application/json", "content-encoding": encoding}
    async with serve() as serving:
        answer = await serving.client.post("/v1/embeddings", content=body, headers=headers)
    assert answer.status_code == status, answer.text
    assert words in answer.json()["error"]["message"]


LOOKS = ["/livez", "/readyz", "/metrics", MODELS, f"{MODELS}/nope", "/v2", "/v2/health/live", "/v2/health/ready"]
LOOKS += [
    f"/v2/models/{of}{end}" for of in ("topics", "topics/versions/1") for end in ("", "/config", "/stats", "/ready")
]
LOOKS += ["/v2/models/stats"]


@pytest.mark.parametrize("has_keys", [False, True])
async def test_what_only_looks_at_the_server_counts_as_no_call(serve, make_key, tmp_path, has_keys):
    key = make_key("reader", "model:*")
    async with serve(**({"access_file": tmp_path / "access.toml"} if has_keys else {})) as serving:
        for headers in (key, {}):  # watchers without a key are refused, and do not count either
            for path in LOOKS:
                assert (await serving.client.get(path, headers=headers)).status_code in (200, 401, 404)
            await serving.client.post("/v2/repository/index", json={}, headers=headers)
            for method in ("ListModels", "ListBundles", "GetModel"):
                path = f"/headway.v1.ModelService/{method}"
                await serving.client.post(path, json={}, headers=headers)
        posted = await serving.client.post("/v1/completions", json={"model": "nope", "prompt": "a"}, headers=key)
        assert posted.status_code == 404
        metrics = (await serving.client.get("/metrics", headers=key)).text
    assert set(re.findall(r'headway_calls_total{.*?method="(.*?)"', metrics)) == {"v1/completions"}


async def test_a_model_that_has_ended_by_itself_fails_both_probes(serve, monkeypatch):
    async with serve() as serving:
        monkeypatch.setattr(type(serving.host), "unhealthy", lambda *_, **__: {"tiny/1": "has ended by itself"})
        for path in ("/livez", "/readyz"):
            answer = await serving.client.get(path)
            assert (answer.status_code, answer.text) == (503, "tiny/1: has ended by itself\n")


async def test_request_ids_are_taken_or_made_and_given_back(serve):
    async with serve() as serving:
        answer = await serving.client.get(MODELS, headers={"x-request-id": "abc-1"})
        assert answer.headers["x-request-id"] == "abc-1"
        assert serving.recorder.calls[-1].request_id == "abc-1"
        for given in ("", "with space", "x" * 129):
            answer = await serving.client.get(MODELS, headers={"x-request-id": given})
            assert len(answer.headers["x-request-id"]) == 16
        refused = await serving.client.get(f"{MODELS}/nope", headers={"x-request-id": "abc-2"})
        assert (refused.status_code, refused.headers["x-request-id"]) == (404, "abc-2")


async def test_what_is_not_there_is_refused_in_a_sentence(serve):
    async with serve() as serving:
        answer = await serving.client.get("/v2/nothing")
        assert answer.status_code == 404
        assert answer.json()["error"]["message"] == "there is nothing at GET /v2/nothing; see docs/http.md"
        answer = await serving.client.post(MODELS)
        assert answer.status_code == 405
        assert "does not take POST" in answer.json()["error"]["message"]


async def test_keys_decide_who_may_call(serve, make_key, tmp_path):
    key, poor = make_key("reader", "model:*"), make_key("poor", "model:*", calls_per_s=0.01, burst=1)
    async with serve(access_file=tmp_path / "access.toml") as serving:
        assert (await serving.client.get(MODELS, headers=key)).status_code == 200
        assert (await serving.client.get("/metrics")).status_code == 401
        for headers in ({}, {"authorization": "Bearer hw_no"}, {"authorization": "Basic abc"}):
            refused = await serving.client.get(MODELS, headers=headers)
            assert refused.status_code == 401
            assert refused.json()["error"]["code"] == "invalid_api_key"
            assert refused.headers["www-authenticate"] == "Bearer"
        assert (await serving.client.get(MODELS, headers=poor)).status_code == 200
        refused = await serving.client.get(MODELS, headers=poor)
        assert refused.status_code == 429
        assert 1 <= int(refused.headers["retry-after"]) <= 100
        assert "has used up its 0.01 calls a second" in refused.json()["error"]["message"]
        assert (await serving.client.get("/livez")).status_code == 200
        assert (await serving.client.get("/readyz")).status_code == 200


async def test_pages_of_other_origins_may_call_only_where_they_are_listed(serve):
    asks = {"origin": "https://app.example", "access-control-request-method": "POST"}
    async with serve() as serving:
        assert (await serving.client.options("/v1/embeddings", headers=asks)).status_code == 405
        answer = await serving.client.get(MODELS, headers=asks)
        assert "access-control-allow-origin" not in answer.headers
    async with serve(http_cors_origins=("https://app.example",)) as serving:
        answer = await serving.client.options("/v1/embeddings", headers=asks)
        assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, "https://app.example")
        answer = await serving.client.get(MODELS, headers=asks)
        assert answer.headers["access-control-allow-origin"] == "https://app.example"
        answer = await serving.client.get(MODELS, headers={"origin": "https://evil.example"})
        assert "access-control-allow-origin" not in answer.headers


@pytest.mark.parametrize("origins", [("https://app.example",), ("*",)], ids=["listed", "all"])
async def test_every_route_answers_pages_that_may_call(serve, monkeypatch, origins):
    """What a browser asks first, errors, and what is wrong with the server itself."""
    origin = {"origin": "https://app.example"}
    allowed = {"*", "https://app.example"}
    async with serve(http_cors_origins=origins) as serving:
        routes = {
            (route.path.replace("{model:path}", "missing"), method)
            for route in serving.http.app.app.routes
            for method in (route.methods or {"POST"}) & {"GET", "POST"}
        }
        assert len(routes) > 60
        for path, method in routes:
            asks = origin | {"access-control-request-method": method, "access-control-request-headers": "x-own"}
            answer = await serving.client.options(path, headers=asks)
            assert (answer.status_code, answer.headers["access-control-allow-origin"] in allowed) == (200, True), path
            if method == "POST":
                answer = await serving.client.post(path, headers=origin | {"content-type": "text/x"}, content=b"{")
                assert answer.headers["access-control-allow-origin"] in allowed, path
        for path in ("/nothing", "/v1/embeddings"):
            answer = await serving.client.get(path, headers=origin)
            assert answer.status_code in (404, 405)
            assert answer.headers["access-control-allow-origin"] in allowed
        monkeypatch.setattr(serving.host, "unhealthy", lambda **_: 1 / 0)
        answer = await serving.client.get("/livez", headers=origin)
        assert (answer.status_code, answer.headers["access-control-allow-origin"] in allowed) == (500, True)


@pytest.mark.parametrize(
    ("origin", "status"), [(None, 400), ("own", 400), ("https://app.example", 400), ("https://evil.example", 415)]
)
@pytest.mark.parametrize("path", ["/v1/audio/transcriptions", "/v1/images/edits"])
async def test_forms_are_taken_from_programs_and_from_pages_that_may_call(serve, path, origin, status):
    async with serve(http_cors_origins=("https://app.example",)) as serving:
        headers = {} if origin is None else {"origin": serving.url if origin == "own" else origin}
        answer = await serving.client.post(path, headers=headers, files={"other": b""})
        assert answer.status_code == status
        if status == 415:
            assert "from a page of another origin" in answer.json()["error"]["message"]


async def test_a_body_of_another_type_or_size_is_refused_before_it_is_read(serve):
    async with serve(max_text_kib=1, max_message_mib=1) as serving:
        answer = await serving.client.post("/v1/embeddings", content=b"{}", headers={"content-type": "text/plain"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (415, "unsupported_media_type")
        head = b"POST /v1/embeddings HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        answer = await raw(serving.port, head + b"content-length: 99999999\r\n\r\n{")
        assert answer.startswith(b"HTTP/1.1 413 ")
        assert b"has 99999999 bytes or more" in answer
        answer = await raw(serving.port, head + b"expect: 100-continue\r\ncontent-length: 99999999\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 413 ")
        chunk = b"10000\r\n" + b" " * 65536 + b"\r\n"
        answer = await raw(serving.port, head + b"transfer-encoding: chunked\r\n\r\n" + chunk, wait_s=0.5)
        assert answer == b""  # more may come
        answer = await raw(serving.port, head + b"transfer-encoding: chunked\r\n\r\n" + chunk * 20)
        assert answer.startswith(b"HTTP/1.1 413 ") or answer == b"reset"
        await until(lambda: len(serving.server.callers._arriving) == 0)


STREAM = b'{"model":"tiny-generation","prompt":"the cat","max_tokens":8,"seed":5,"stream":true}'
WHOLE = STREAM.replace(b"true", b"false")


def request(body: bytes, version: str) -> bytes:
    head = f"POST /v1/completions HTTP/{version}\r\nhost: x\r\ncontent-type: application/json\r\n"
    return head.encode() + b"content-length: %d\r\n\r\n" % len(body) + body


@pytest.mark.parametrize("path", ["/v1/completions", "/headway.v1.ModelService/ScanStore"])
@pytest.mark.parametrize(
    "headers", [b"host: x\r\norigin: http://[\r\n", b"host: [\r\n", b"host: [\r\norigin: null\r\n"]
)
async def test_names_that_are_no_addresses_are_foreign(serve, path, headers):
    async with serve() as serving:
        kind = b"text/plain" if path == "/v1/completions" else b"application/json"
        head = b"POST %s HTTP/1.1\r\n%scontent-type: %s\r\ncontent-length: 2\r\n\r\n" % (path.encode(), headers, kind)
        answer = await raw(serving.port, head + b"{}")
        assert answer.startswith((b"HTTP/1.1 415 ", b"HTTP/1.1 403 ")), answer


@pytest.mark.parametrize("ask", [b"GET /readyz HTTP/1.0\r\n\r\n", request(WHOLE, "1.0"), request(STREAM, "1.0")])
async def test_a_caller_of_http_1_0_gets_no_chunks(serve, ask):
    async with serve() as serving:
        answer = await raw(serving.port, ask)
        head, _, body = answer.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 ")
        assert b"transfer-encoding" not in head
        assert b"connection: close" in head
        if b"content-length: " in head:
            assert int(head.partition(b"content-length: ")[2].split()[0]) == len(body)
        else:
            assert body.startswith(b"data: {")
            assert body.endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize(
    "ask", [b"GET /readyz HTTP/1.1\r\nhost: x\r\n\r\n", request(WHOLE, "1.1"), request(STREAM, "1.1")]
)
async def test_a_caller_who_sends_no_more_is_answered(serve, ask):
    async with serve() as serving:
        reader, writer = await asyncio.open_connection("127.0.0.1", serving.port)
        writer.write(ask)
        writer.write_eof()
        answer = await asyncio.wait_for(reader.read(), 20)
        writer.close()
        assert b"HTTP/1.1 200 " in answer
        assert answer.endswith((b"ok\n", b"}", b"data: [DONE]\n\n\r\n0\r\n\r\n"))
        if b"100 Continue" in answer:
            assert answer.startswith(b"HTTP/1.1 100 Continue\r\n\r\n")


async def test_a_caller_of_http_1_0_who_sends_no_more_has_until_the_next_sweep(serve, monkeypatch):
    monkeypatch.setattr(http_server, "_SWEEP_S", 0.02)
    async with serve() as serving:
        slow_down(serving.decoder, 0.02)
        _, writer = await asyncio.open_connection("127.0.0.1", serving.port)
        writer.write(request(WHOLE.replace(b":8,", b":50,"), "1.0"))
        await until(lambda: serving.server.calls.num_running == 1)
        writer.close()
        await until(lambda: serving.recorder.finished)
        assert serving.recorder.finished[-1] == ("/v1/completions", "CancelledError")


async def test_half_a_request_and_endless_headers_are_cut_off(serve, monkeypatch):
    async with serve(connection={"request_timeout": 0.2}) as serving:
        head = (
            b"POST /v1/embeddings HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 10\r\n\r\n"
        )
        reader, writer = await asyncio.open_connection("127.0.0.1", serving.port)
        writer.write(head + b"{")
        answer = await asyncio.wait_for(reader.readuntil(b"\r\n"), 5)
        assert answer.startswith(b"HTTP/1.1 504 ")
        writer.close()
        for start in (b"", b"GET /livez HTTP/1.1\r\nx: "):
            reader, writer = await asyncio.open_connection("127.0.0.1", serving.port)
            writer.write(start)
            with pytest.raises((asyncio.IncompleteReadError, ConnectionResetError)):
                await asyncio.wait_for(reader.readexactly(1), 5)
            writer.close()
        answer = await raw(serving.port, b"GET /livez HTTP/1.1\r\n" + b"x: " + b"y" * 200_000)
        assert answer.startswith((b"HTTP/1.1 400 ", b"reset"))
        assert (await serving.client.get("/livez")).status_code == 200
        assert await raw(serving.port, b"\x16\x03\x01 nonsense\r\n\r\n") != b""


async def test_a_head_behind_a_call_that_runs_is_bounded_as_the_first_is(serve):
    async with serve() as serving:
        slow_down(serving.decoder, 0.05)
        body = b'{"model": "tiny-generation", "prompt": "the", "max_tokens": 60, "stream": true}'
        head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        call = head + b"content-length: %d\r\n\r\n" % len(body) + body
        for second, is_cut in [(b"GET /livez HTTP/1.1\r\nx: y\r\n", False), (b"GET /livez HTTP/1.1\r\nx: ", True)]:
            reader, writer = await asyncio.open_connection("127.0.0.1", serving.port)
            writer.write(call)
            assert await asyncio.wait_for(reader.readuntil(b"data: "), 5)
            writer.write(second)
            with suppress(ConnectionError):
                for _ in range(20 if is_cut else 0):
                    await asyncio.sleep(0.01)
                    writer.write(b"z" * 64 * 2**10)
                    await writer.drain()
            with suppress(TimeoutError, ConnectionError):
                while not reader.at_eof():
                    await asyncio.wait_for(reader.read(2**16), 0.5)
            assert (reader.at_eof() or reader.exception() is not None) == is_cut
            [connection] = serving.http._server.server_state.connections or [None]
            assert (connection is None) == is_cut
            writer.close()
            await until(lambda: not serving.http._server.server_state.connections)


PROBE = b"GET /livez HTTP/1.1\r\n\r\n"


@pytest.mark.parametrize("first", [PROBE, request(STREAM.replace(b":8,", b":30,"), "1.1")])
async def test_requests_behind_another_wait_unparsed_and_are_answered(serve, first):
    async with serve() as serving:
        slow_down(serving.decoder, 0.01)
        reader, writer = await asyncio.open_connection("127.0.0.1", serving.port)
        answer, most = b"", 0
        with longest_turn() as turn:
            writer.write(first + PROBE * 8_000)
            while answer.count(b"ok\n") < 2_000:
                answer += await asyncio.wait_for(reader.read(2**20), 10)
                [connection] = serving.http._server.server_state.connections
                most = max(most, len(connection.pipeline))
        writer.close()
        assert most < 64
        assert turn.seconds < 0.05


OFFER = b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAEAAEAAAAIAAAAB\r\n"


@pytest.mark.parametrize("size", [1, 100, 10_000])
async def test_a_request_that_offers_another_protocol_is_read_whole(serve, size):
    async with serve() as serving:
        whole = request(WHOLE, "1.1")
        head, _, body = whole.partition(b"\r\n\r\n")
        chunked = head.rpartition(b"\r\n")[0] + b"\r\ntransfer-encoding: chunked"
        chunks = b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)
        sent = b"".join((head, b"\r\n", OFFER, b"\r\n", body, chunked, b"\r\n", OFFER, b"\r\n", chunks, whole))
        reader, writer = await asyncio.open_connection("127.0.0.1", serving.port)
        for start in range(0, len(sent), size):
            writer.write(sent[start : start + size])
            await writer.drain()
            await asyncio.sleep(0)
        answer = b""
        while answer.count(b'"finish_reason"') < 3:
            answer += await asyncio.wait_for(reader.read(2**16), 10)
        writer.close()
        assert answer.count(b"HTTP/1.1 200 ") == 3
        assert (await raw(serving.port, b"CONNECT /livez HTTP/1.1\r\n\r\n")).startswith(b"HTTP/1.1 400 ")


async def test_connections_past_the_limit_are_closed_at_once(serve):
    async with serve(connection={"max_connections": 2}) as serving:
        held = [await asyncio.open_connection("127.0.0.1", serving.port) for _ in range(2)]
        await asyncio.sleep(0.05)
        reader, writer = await asyncio.open_connection("127.0.0.1", serving.port)
        with pytest.raises((asyncio.IncompleteReadError, ConnectionResetError)):
            await asyncio.wait_for(reader.readexactly(1), 5)
        for _, open_writer in [*held, (reader, writer)]:
            open_writer.close()


async def test_what_a_body_holds_is_counted_before_it_is_parsed():
    check_elements(b'{"input":["' + b"a,[{" * 20_000 + rb'\\"' + b',"\\",[[{{"]}')
    with pytest.raises(InvalidInputError, match="more than 65536 elements"):
        check_elements(b'{"input":[' + b"1," * 70_000 + b"1]}")
    with pytest.raises(InvalidInputError, match="more than 8192 objects"):
        check_elements(b'{"input":[' + b"{}," * 9_000 + b"1]}")
    with pytest.raises(InvalidInputError, match="strings"):
        check_elements(b'["",' * 140_000)
    began = time.perf_counter()
    check_elements(b'{"input":["' + b"a,[{" * 2**20 + b'"]}')
    assert time.perf_counter() - began < 1


async def test_it_is_encrypted_with_the_servers_certificate_and_knows_the_callers(serve, tmp_path):
    authority = trustme.CA()
    server, caller = authority.issue_cert("127.0.0.1"), authority.issue_cert("caller.example")
    server.private_key_and_cert_chain_pem.write_to_path(tmp_path / "server.pem")
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    (tmp_path / "access.toml").write_text('[certificates."caller.example"]\nscopes = ["model:*"]\n')
    trusting = ssl.create_default_context()
    authority.configure_trust(trusting)
    caller.configure_cert(trusting)
    files = {"tls_cert_file": tmp_path / "server.pem", "tls_key_file": tmp_path / "server.pem"}
    options = {"tls_client_ca_file": tmp_path / "ca.pem", "access_file": tmp_path / "access.toml"}
    async with serve(verify=trusting, **files, **options) as serving:
        assert (await serving.client.get(MODELS)).status_code == 200
        assert serving.recorder.calls[-1].caller == "caller.example"


async def test_while_it_drains_calls_are_refused_and_probes_answer(serve):
    async with serve() as serving:
        serving.server.calls.refuse_new()
        answer = await serving.client.get(MODELS)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "draining")
        assert answer.headers["retry-after"] == "1"
        assert (await serving.client.get("/livez")).status_code == 200
        assert (await serving.client.get("/readyz")).text == "the server is shutting down\n"
        began = time.monotonic()
        assert await serving.server.stop()
        assert time.monotonic() - began < 5
        with pytest.raises(OSError, match="refused"):
            socket.create_connection(("127.0.0.1", serving.port), timeout=2)


async def test_a_bug_is_told_as_an_incident_and_not_in_its_own_words(serve, monkeypatch):
    async with serve() as serving:
        monkeypatch.setattr(type(serving.host), "get", lambda *_: 1 / 0)
        answer = await serving.client.get(f"{MODELS}/x")
        assert answer.status_code == 500
        assert "internal error; the server's log has it as incident" in answer.json()["error"]["message"]
        assert "division" not in answer.text


def test_only_this_machine_by_its_own_name_counts_as_local():
    def exchange(client, **headers):
        pairs = [(name.encode(), value.encode()) for name, value in headers.items()]
        scope = {"headers": pairs, "state": {}, "client": (client, 1)}
        owner = edge.Edge(None, None, origins=["https://app.example"])
        made = edge._Exchange.__new__(edge._Exchange)
        made._edge, made._scope, made.headers = owner, scope, headers
        return made

    assert exchange("127.0.0.1", host="localhost:8080").is_local
    assert exchange("::1", host="[::1]:8080", origin="http://[::1]:8080").is_local
    assert exchange("::1", host="localhost:8080", origin="https://app.example").is_local
    assert not exchange("::1", host="localhost:8080", origin="https://evil.example").is_local
    assert not exchange("127.0.0.1", host="evil.example:8080").is_local
    assert not exchange("127.0.0.1", host="localhost", origin="https://evil.example").is_local
    assert not exchange("10.0.0.1", host="localhost").is_local
