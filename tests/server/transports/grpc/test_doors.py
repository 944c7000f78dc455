"""Who is let in at the port: keys, certificates, and both of them changed while the server runs."""

import asyncio
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest
import trustme
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from open_inference import infer_request
from rpc_failures import failure_of

from headway.oip import grpc_predict_v2_pb2, grpc_predict_v2_pb2_grpc
from headway.v1 import model_service_pb2
from headway.v1 import text_classification_service_pb2 as pb
from headway.v1 import text_classification_service_pb2_grpc as pb_grpc
from headway_server import keys
from headway_server.errors import AccessError
from headway_server.serving import files as files_module
from headway_server.serving.files import Certificates


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files_module, "_INTERVAL_S", 0.02)


@pytest.fixture
def access_file(tmp_path: Path) -> Path:
    return tmp_path / "access.toml"


@pytest.fixture
def make_key(access_file: Path, capsys: pytest.CaptureFixture[str]):
    def make(name: str, *scopes: str, **budget: object) -> str:
        flags = [part for scope in scopes for part in ("--scope", scope)]
        flags += [part for name, value in budget.items() for part in (f"--{name.replace('_', '-')}", str(value))]
        keys.main(["create", name, "--access-file", str(access_file), *flags])
        return capsys.readouterr().out.splitlines()[-1]  # log lines may stand before it

    return make


def classify(channel, key: str = "", model: str = ""):
    metadata = [("authorization", f"Bearer {key}")] if key else []
    request = pb.ClassifyTextRequest(texts=["star goal atom"], model=model)
    return pb_grpc.TextClassificationServiceStub(channel).ClassifyText(request, metadata=metadata, timeout=20)


async def health(channel) -> int:
    answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=20)
    return answer.status


async def test_keys_decide_who_may_call_what(serve, classifier_store, access_file, make_key):
    reader, viewer = make_key("reader", "model:top*"), make_key("viewer", "task:image_classification")
    async with serve(classifier_store, access_file=access_file) as serving:
        assert (await classify(serving.channel, reader)).results[0].labels[0].label == "science"
        refused = await failure_of(classify(serving.channel))
        assert (refused.code, refused.reason) == (grpc.StatusCode.UNAUTHENTICATED, "UNKNOWN_CALLER")
        refused = await failure_of(classify(serving.channel, reader[:-1]))
        assert (refused.code, refused.reason) == (grpc.StatusCode.UNAUTHENTICATED, "UNKNOWN_CALLER")
        refused = await failure_of(classify(serving.channel, viewer))
        assert (refused.code, refused.reason) == (grpc.StatusCode.PERMISSION_DENIED, "FORBIDDEN")
        assert "key viewer may not use model topics" in refused.message
        assert await health(serving.channel) == health_pb2.HealthCheckResponse.SERVING


async def test_of_a_caller_who_is_not_known_no_request_is_awaited(serve, classifier_store, access_file, make_key):
    make_key("somebody", "model:*")

    async def nothing():
        await asyncio.Event().wait()
        yield b""

    async with serve(classifier_store, access_file=access_file) as serving:
        method = serving.channel.stream_unary("/headway.v1.TextClassificationService/ClassifyText")
        refused = await failure_of(method(nothing(), timeout=20))
        assert (refused.code, refused.reason) == (grpc.StatusCode.UNAUTHENTICATED, "UNKNOWN_CALLER")


async def test_budgets_refuse_with_a_time_to_come_back(serve, classifier_store, access_file, make_key):
    fast = make_key("fast", "model:*", calls_per_s=0.5)
    wordy = make_key("wordy", "model:*", tokens_per_minute=4)
    async with serve(classifier_store, access_file=access_file) as serving:
        for key in (fast, wordy):
            await classify(serving.channel, key)  # its text has four tokens
            refused = await failure_of(classify(serving.channel, key))
            assert (refused.code, refused.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "BUDGET_USED_UP")
            assert refused.retry_after_s is not None
            assert 0.5 < refused.retry_after_s <= 15


async def test_a_changed_access_file_is_read_and_a_broken_one_is_not_used(
    serve, classifier_store, access_file, make_key
):
    first = make_key("first", "model:*")
    async with serve(classifier_store, access_file=access_file) as serving:
        await classify(serving.channel, first)
        good = access_file.read_text()
        access_file.write_text("[keys")
        await asyncio.sleep(0.1)
        await classify(serving.channel, first)
        access_file.write_text(good)
        second = make_key("second", "model:*")
        keys.main(["revoke", "first", "--access-file", str(access_file)])
        async with asyncio.timeout(20):
            while (await _code(classify(serving.channel, first))) is not grpc.StatusCode.UNAUTHENTICATED:
                pass
        await classify(serving.channel, second)


async def _code(call) -> grpc.StatusCode:
    try:
        await call
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


async def test_calls_that_change_the_server_need_the_scope(serve, classifier_store, access_file, make_key):
    user, admin = make_key("user", "model:*"), make_key("admin", "admin")
    request = model_service_pb2.ScanStoreRequest()
    async with serve(classifier_store, access_file=access_file) as serving:
        refused = await failure_of(serving.models.ScanStore(request, metadata=[("x-api-key", user)]))
        assert (refused.code, refused.reason) == (grpc.StatusCode.PERMISSION_DENIED, "FORBIDDEN")
        await serving.models.ScanStore(request, metadata=[("x-api-key", admin)])
    async with serve(classifier_store) as serving:
        await serving.models.ScanStore(request)  # without access control: from this machine


async def test_the_open_inference_protocol_is_held_to_keys_scopes_and_budgets(
    serve, classifier_store, access_file, make_key
):
    def keyed(key: str) -> list[tuple[str, str]]:
        return [("authorization", f"Bearer {key}")]

    user, viewer = make_key("user", "model:topics", tokens_per_minute=4), make_key("viewer", "model:colours")
    request = infer_request("topics", "star goal atom")
    async with serve(classifier_store, access_file=access_file) as serving:
        stub = grpc_predict_v2_pb2_grpc.GRPCInferenceServiceStub(serving.channel)
        assert await _code(stub.ModelInfer(request)) is grpc.StatusCode.UNAUTHENTICATED
        assert await _code(stub.ModelInfer(request, metadata=keyed(viewer))) is grpc.StatusCode.PERMISSION_DENIED
        load = grpc_predict_v2_pb2.RepositoryModelLoadRequest(model_name="topics")
        assert await _code(stub.RepositoryModelLoad(load, metadata=keyed(user))) is grpc.StatusCode.PERMISSION_DENIED
        # Nothing is written: asyncio's client makes INTERNAL of a write that comes after the refusal.
        assert await _code(stub.ModelStreamInfer(timeout=20).read()) is grpc.StatusCode.UNAUTHENTICATED
        stream = stub.ModelStreamInfer(iter([request, request]), metadata=keyed(user), timeout=20)
        errors = sorted([message.error_message async for message in stream])
        assert errors[0] == ""  # the first message uses the budget up, the second is a call of its own
        refused = await failure_of(stub.ModelInfer(request, metadata=keyed(user)))
        assert (refused.code, refused.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "BUDGET_USED_UP")


@pytest.mark.parametrize("offered", [True, False])
async def test_reflection_can_be_switched_off(serve, classifier_store, offered):
    async with serve(classifier_store, reflection=offered) as serving:
        stub = reflection_pb2_grpc.ServerReflectionStub(serving.channel)
        if offered:
            request = reflection_pb2.ServerReflectionRequest(list_services="")
            answer = await stub.ServerReflectionInfo(iter([request]), timeout=20).read()
            assert len(answer.list_services_response.service) > 5
        else:  # nothing is written: asyncio's client makes INTERNAL of a write that comes after the refusal
            refused = await failure_of(stub.ServerReflectionInfo(timeout=20).read())
            assert refused.code is grpc.StatusCode.UNIMPLEMENTED


# Certificates


def write_certificate(authority: trustme.CA, folder: Path) -> dict[str, Path]:
    """Writes a certificate for 127.0.0.1 and its key; returns the settings that name them."""
    made = authority.issue_cert("127.0.0.1")
    settings = {"tls_cert_file": folder / "cert.pem", "tls_key_file": folder / "key.pem"}
    for path, blob in zip(settings.values(), (made.cert_chain_pems[0], made.private_key_pem), strict=True):
        path.write_bytes(blob.bytes())
    return settings


@asynccontextmanager
async def secure(port: int, authority: trustme.CA, client: trustme.LeafCert | None = None):
    shown = [] if client is None else [client.private_key_pem.bytes(), client.cert_chain_pems[0].bytes()]
    credentials = grpc.ssl_channel_credentials(authority.cert_pem.bytes(), *shown)
    # Connections of channels with the same credentials would be shared, and a handshake not be made anew.
    options = [("grpc.use_local_subchannel_pool", 1)]
    async with grpc.aio.secure_channel(f"127.0.0.1:{port}", credentials, options) as channel:
        yield channel


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


async def test_certificates_are_replaced_without_a_restart(serve, classifier_store, authority, tmp_path):
    other = trustme.CA()
    settings = write_certificate(authority, tmp_path)
    async with serve(classifier_store, **settings) as serving, secure(serving.port, authority) as old:
        await classify(old)
        assert await _code(classify(serving.channel)) is grpc.StatusCode.UNAVAILABLE  # not encrypted
        async with secure(serving.port, other) as early:
            assert await _code(classify(early)) is grpc.StatusCode.UNAVAILABLE
        settings["tls_cert_file"].write_bytes(b"half a file")
        await asyncio.sleep(0.1)
        async with secure(serving.port, authority) as meanwhile:
            await classify(meanwhile)
        write_certificate(other, tmp_path)
        async with asyncio.timeout(20):
            while True:
                async with secure(serving.port, other) as new:
                    if await _code(classify(new)) is grpc.StatusCode.OK:
                        break
        await classify(old)  # a connection goes on with the certificate it was made with


async def test_clients_are_known_by_their_certificates(serve, classifier_store, authority, access_file, tmp_path):
    authority.cert_pem.write_to_path(str(tmp_path / "clients.pem"))
    settings = write_certificate(authority, tmp_path) | {"tls_client_ca_file": tmp_path / "clients.pem"}
    access_file.write_text('[certificates."search.example.org"]\nscopes = ["model:topics"]')
    named, unknown = authority.issue_cert("search.example.org"), authority.issue_cert("else.example.org")
    stranger = trustme.CA().issue_cert("search.example.org")
    async with serve(classifier_store, access_file=access_file, **settings) as serving:
        async with secure(serving.port, authority, named) as channel:
            await classify(channel)
        async with secure(serving.port, authority, unknown) as channel:
            refused = await failure_of(classify(channel))
            assert (refused.code, refused.reason) == (grpc.StatusCode.PERMISSION_DENIED, "FORBIDDEN")
            assert await health(channel) == health_pb2.HealthCheckResponse.SERVING
        for client in (None, stranger):
            async with secure(serving.port, authority, client) as channel:
                assert await _code(classify(channel)) is grpc.StatusCode.UNAVAILABLE


async def test_health_has_a_port_of_its_own_for_probes_without_certificates(
    serve, classifier_store, authority, tmp_path
):
    settings = write_certificate(authority, tmp_path) | {"health_port": 0}
    async with serve(classifier_store, **settings) as serving:
        port = serving.server.doors[0].health_port
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            assert await health(channel) == health_pb2.HealthCheckResponse.SERVING
            assert await _code(classify(channel)) is grpc.StatusCode.UNIMPLEMENTED


async def test_watches_at_the_port_for_health_shut_no_probe_out(serve, classifier_store):
    async with serve(classifier_store, health_port=0) as serving:
        assert (await classify(serving.channel)).results
        async with grpc.aio.insecure_channel(f"127.0.0.1:{serving.server.doors[0].health_port}") as channel:
            assert await _code(classify(channel)) is grpc.StatusCode.UNIMPLEMENTED
            watch = health_pb2_grpc.HealthStub(channel).Watch
            watches = [watch(health_pb2.HealthCheckRequest()) for _ in range(100)]
            states = await asyncio.gather(*(each.read() for each in watches), return_exceptions=True)
            assert sum(isinstance(state, health_pb2.HealthCheckResponse) for state in states) == 16
            assert await health(channel) == health_pb2.HealthCheckResponse.SERVING


def test_certificates_that_cannot_be_used_are_refused(authority, tmp_path):
    cert, key = write_certificate(authority, tmp_path).values()
    (tmp_path / "other").mkdir()
    other_cert, _ = write_certificate(trustme.CA(), tmp_path / "other").values()
    empty = tmp_path / "empty.pem"
    empty.touch()
    assert Certificates.read(cert, key, other_cert).chain == cert.read_bytes()
    for files, message in (
        ((cert, tmp_path / "absent.pem", None), r"absent\.pem: No such file"),
        ((empty, key, None), r"empty\.pem, .*key\.pem: are not a certificate and its key"),
        ((other_cert, key, None), "KEY_VALUES_MISMATCH"),
        ((cert, key, empty), r"empty\.pem: has no certificate in PEM"),
    ):
        with pytest.raises(AccessError, match=message):
            Certificates.read(*files)
