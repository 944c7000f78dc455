"""Health, reflection, limits, deadlines and drain of a server in this process."""

import asyncio
import time
from types import SimpleNamespace

import grpc
import pytest
import structlog
import tiny_bundles
from edge import make_application
from google.protobuf import descriptor_pool
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2
from h2_caller import Caller, frame
from rpc_failures import failure_of
from tiny_engine import make_decoder, make_generation_model
from waiting import until

from headway.oip import grpc_predict_v2_pb2, grpc_predict_v2_pb2_grpc
from headway.v1 import generation_service_pb2 as generation_pb
from headway.v1 import generation_service_pb2_grpc as generation_grpc
from headway.v1 import image_classification_service_pb2 as images_pb
from headway.v1 import model_service_pb2
from headway.v1 import text_classification_service_pb2 as texts_pb
from headway.v1 import text_classification_service_pb2_grpc as texts_grpc
from headway_server.errors import ServerError
from headway_server.services import service_descriptors
from headway_server.serving.addresses import address_problem
from headway_server.serving.host import ModelHost
from headway_server.settings import ServerSettings

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
OWN = [("grpc.use_local_subchannel_pool", 1)]
GENERATION = "headway.v1.GenerationService"


async def health_of(serving, service: str = "") -> int:
    stub = health_pb2_grpc.HealthStub(serving.channel)
    return (await stub.Check(health_pb2.HealthCheckRequest(service=service))).status


async def until_not_serving(serving) -> None:
    async with asyncio.timeout(30):
        while await health_of(serving) == SERVING:  # noqa: ASYNC110 (what is waited for sets no event)
            await asyncio.sleep(0.01)


def classify(serving, *texts: str, truncate: bool = False, timeout: float | None = None):
    request = texts_pb.ClassifyTextRequest(texts=texts or ["goal"], truncate=truncate)
    return serving.texts.ClassifyText(request, timeout=timeout)


@pytest.fixture
def busy(serving):
    """The text model's turn to run: while it is held, calls wait."""
    [model] = [model for model in serving.host.models if model.bundle.manifest.name == "topics"]
    return model._batcher._lanes


@pytest.fixture
def calls(serving):
    return serving.server.calls


# Health and reflection


async def test_health_is_told_for_the_whole_and_for_each_service(serving):
    assert await health_of(serving) == SERVING
    for service in ("TextClassificationService", "ImageClassificationService", "ModelService"):
        assert await health_of(serving, f"headway.v1.{service}") == SERVING
    for service in ("GenerationService", "TranslationService", "TextToTextService"):
        assert await health_of(serving, f"headway.v1.{service}") == NOT_SERVING
    stub = health_pb2_grpc.HealthStub(serving.channel)
    failure = await failure_of(stub.Check(health_pb2.HealthCheckRequest(service="headway.v1.Nothing")))
    assert failure.code is grpc.StatusCode.NOT_FOUND


async def test_a_model_that_has_ended_by_itself_is_not_serving(classifier_store, serve, monkeypatch):
    monkeypatch.setattr("headway_server.services.application._HEALTH_INTERVAL_S", 0.01)
    async with serve(classifier_store) as serving:
        [model] = [model for model in serving.host.models if model.bundle.manifest.name == "topics"]
        await asyncio.to_thread(model.close)
        await until_not_serving(serving)
        assert await health_of(serving, "headway.v1.TextClassificationService") == NOT_SERVING
        assert await health_of(serving, "headway.v1.ImageClassificationService") == SERVING


async def test_a_model_that_has_ended_is_told_though_another_does_its_task(serve, tmp_path, monkeypatch):
    monkeypatch.setattr("headway_server.services.application._HEALTH_INTERVAL_S", 0.01)
    for name in ("one", "other"):
        tiny_bundles.write_topic_bundle(tmp_path, name=name)
    async with serve(tmp_path) as serving:
        await asyncio.to_thread(serving.host.models[0].close)
        await until_not_serving(serving)
        assert await health_of(serving, "headway.v1.TextClassificationService") == SERVING


async def test_a_decoder_whose_thread_has_ended_is_not_serving(monkeypatch):
    monkeypatch.setattr("headway_server.services.application._HEALTH_INTERVAL_S", 0.01)

    def end_the_thread(token_ids, positions, *rest):
        raise SystemExit

    decoder = make_decoder()
    host = ModelHost([make_generation_model(decoder)])
    server = make_application(host, ServerSettings(store="none", port=0))
    port = await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        serving = SimpleNamespace(channel=channel)
        stub = generation_grpc.GenerationServiceStub(channel)
        request = generation_pb.GenerateTextRequest(prompts=["the cat"])
        await stub.GenerateText(request)
        assert await health_of(serving) == await health_of(serving, GENERATION) == SERVING
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=GENERATION))
        assert (await watch.read()).status == SERVING
        decoder.decode = end_the_thread
        assert (await failure_of(stub.GenerateText(request))).code is grpc.StatusCode.INTERNAL
        assert (await watch.read()).status == NOT_SERVING
        await until_not_serving(serving)
        assert (await failure_of(stub.GenerateText(request))).code is grpc.StatusCode.INTERNAL
        watch.cancel()
        await server.stop()


async def test_models_that_a_stop_closes_slowly_are_not_out_of_order(monkeypatch):
    monkeypatch.setattr("headway_server.services.application._HEALTH_INTERVAL_S", 0.01)
    host = ModelHost([make_generation_model(make_decoder())])
    server = make_application(host, ServerSettings(store="none", port=0))
    await server.start()
    close = host.close

    def close_slowly() -> bool:
        has_ended = close()
        time.sleep(0.2)
        return has_ended

    monkeypatch.setattr(host, "close", close_slowly)
    with structlog.testing.capture_logs() as lines:
        assert await server.stop()
    assert [line["event"] for line in lines] == ["draining", "stopped"]


@pytest.mark.parametrize("version", ["v1", "v1alpha"])
async def test_reflection_lists_and_describes_every_service(serving, version):
    name = f"grpc.reflection.{version}.ServerReflection"
    reflect = serving.channel.stream_stream(
        f"/{name}/ServerReflectionInfo",
        reflection_pb2.ServerReflectionRequest.SerializeToString,
        reflection_pb2.ServerReflectionResponse.FromString,
    )
    list_all = reflection_pb2.ServerReflectionRequest(list_services="")
    [response] = [response async for response in reflect(iter([list_all]))]
    listed = {service.name for service in response.list_services_response.service}
    others = {"grpc.health.v1.Health", *(f"grpc.reflection.{each}.ServerReflection" for each in ("v1", "v1alpha"))}
    assert listed == {service.full_name for service in service_descriptors()} | others
    requests = [reflection_pb2.ServerReflectionRequest(file_containing_symbol=each) for each in sorted(listed)]
    pool = descriptor_pool.DescriptorPool()
    async for response in reflect(iter(requests)):
        files = response.file_descriptor_response.file_descriptor_proto
        for data in reversed(files):
            pool.AddSerializedFile(data)
    assert [pool.FindServiceByName(each).full_name for each in sorted(listed)] == sorted(listed)
    [method] = pool.FindServiceByName(name).methods
    assert (method.input_type.file.package, method.output_type.file.package) == (f"grpc.reflection.{version}",) * 2
    assert method.output_type.fields_by_name["original_request"].message_type is method.input_type


async def test_the_open_inference_protocol_can_be_left_out(serve, classifier_store):
    async with serve(classifier_store, open_inference=False) as serving:
        stub = grpc_predict_v2_pb2_grpc.GRPCInferenceServiceStub(serving.channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.ServerLive(grpc_predict_v2_pb2.ServerLiveRequest())
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_bundles_that_could_not_be_loaded_are_listed(serve, tmp_path):
    tiny_bundles.write_colour_bundle(tmp_path)
    (tiny_bundles.write_topic_bundle(tmp_path).path / "model.onnx").write_bytes(b"tampered")
    async with serve(tmp_path) as serving:
        response = await serving.models.ListModels(model_service_pb2.ListModelsRequest())
        assert [model.name for model in response.models] == ["colours"]
        [rejected] = response.rejected_bundles
        assert rejected.path == "topics/1"
        assert "model.onnx has 8 bytes" in rejected.reason
        assert await health_of(serving) == SERVING
        assert await health_of(serving, "headway.v1.TextClassificationService") == NOT_SERVING


async def test_two_servers_do_not_share_a_port(serving, classifier_store):
    taken = serving.port
    problem = address_problem("127.0.0.1", taken)
    assert problem == "Address already in use"
    second = make_application(serving.host, ServerSettings(store=classifier_store, port=taken))
    with pytest.raises(ServerError, match=f"cannot listen on 127.0.0.1:{taken}"):
        await second.start()


# Limits


async def test_a_message_past_the_limit_is_refused_with_limit_and_value(serve, classifier_store):
    async with serve(classifier_store, max_message_mib=1) as serving:
        failure = await failure_of(classify(serving, "x" * 2**21))
        assert failure.code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "larger than max (2097" in failure.message
        assert "vs. 1048576" in failure.message
        assert (await classify(serving, "goal")).results


async def test_a_request_of_texts_is_held_to_less_than_one_of_images(serve, classifier_store):
    async with serve(classifier_store, max_text_kib=64) as serving:  # 2 x 16 x 64 KiB is less than 8 MiB
        failure = await failure_of(classify(serving, "x" * 2**23))
        assert (failure.code, failure.field) == (grpc.StatusCode.INVALID_ARGUMENT, "request")
        assert "bytes, the limit of this service is 8388608; send it in several calls" in failure.message
        failure = await failure_of(classify(serving, "x" * (2**23 - 100)))
        assert failure.field == "texts[0]"
        request = images_pb.ClassifyImageRequest(images=[b"x" * (2**23 + 1)])
        assert (await failure_of(serving.images.ClassifyImage(request))).field == "images[0]"


async def test_more_bytes_of_requests_than_are_taken_on_at_once_are_refused_unparsed(serve, classifier_store):
    async with serve(classifier_store, max_inflight_mib=1, max_text_kib=1024) as serving:
        [model] = [model for model in serving.host.models if model.bundle.manifest.name == "topics"]
        texts = ["goal " * 30] * 200
        with model._batcher._lanes:
            running = [asyncio.ensure_future(classify(serving, "x" * 600_000, truncate=True))]
            await until(lambda: serving.server.calls.num_running == 1)
            failure = await failure_of(classify(serving, "x" * 600_000))
            assert (failure.code, failure.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "OVERLOADED")
            assert "bytes of calls waiting, the limit is 1048576" in failure.message
            assert failure.retry_after_s > 0
            running.append(asyncio.ensure_future(classify(serving, *texts)))
            await until(lambda: serving.server.calls.num_running == 2)
        assert [len((await call).results) for call in running] == [1, 200]


async def test_a_full_queue_is_told_with_a_time_to_come_back(serve, classifier_store):
    async with serve(classifier_store, batching={"max_waiting_texts": 256}) as serving:
        [model] = [model for model in serving.host.models if model.bundle.manifest.name == "topics"]
        with model._batcher._lanes:
            first = asyncio.ensure_future(classify(serving, *["goal"] * 200))
            await until(lambda: model._admission.num_admitted == 200)
            failure = await failure_of(classify(serving, *["goal"] * 57))
        assert (failure.code, failure.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "OVERLOADED")
        assert failure.retry_after_s > 0
        assert "200 texts waiting, the limit is 256" in failure.message
        assert len((await first).results) == 200


# Deadlines, cancellation, bugs


async def test_calls_past_the_most_that_may_run_are_refused(serve, classifier_store):
    async with serve(classifier_store, max_calls=1) as serving:
        [model] = [model for model in serving.host.models if model.bundle.manifest.name == "topics"]
        with model._batcher._lanes:
            running = asyncio.ensure_future(classify(serving))
            await until(lambda: serving.server.calls.num_running == 1)
            failure = await failure_of(classify(serving))
            assert failure.code is grpc.StatusCode.RESOURCE_EXHAUSTED
        await running
        await classify(serving)


async def test_a_call_past_its_deadline_ends_and_leaves_nothing_behind(serving, busy, calls):
    with busy:
        failure = await failure_of(classify(serving, *["goal"] * 100, timeout=0.2))
        assert failure.code is grpc.StatusCode.DEADLINE_EXCEEDED
        await until(lambda: calls.num_running == 0)
    assert (await classify(serving)).results


async def test_a_cancelled_call_is_dropped(serving, busy, calls):
    with busy:
        call = classify(serving, *["goal"] * 100)
        await until(lambda: calls.num_running == 1)
        call.cancel()
        await until(lambda: calls.num_running == 0)
    assert (await classify(serving)).results


async def test_a_bug_is_answered_with_an_incident_and_the_server_goes_on(serving, monkeypatch):
    [model] = [model for model in serving.host.models if model.bundle.manifest.name == "topics"]
    monkeypatch.setattr(model._batcher, "_graph", None)
    failure = await failure_of(classify(serving))
    assert (failure.code, failure.reason) == (grpc.StatusCode.INTERNAL, "INTERNAL")
    assert failure.incident in failure.message
    assert "NoneType" not in failure.message
    monkeypatch.undo()
    assert (await classify(serving)).results


# Drain


async def test_draining_refuses_new_calls_finishes_running_ones_and_flips_health(serving, busy, calls):
    with busy:
        running = asyncio.ensure_future(classify(serving))
        await until(lambda: calls.num_running == 1)
        stopping = asyncio.create_task(serving.server.stop())
        await until(lambda: calls.is_draining)
        assert await health_of(serving) == NOT_SERVING
        assert await health_of(serving, "headway.v1.TextClassificationService") == NOT_SERVING
        failure = await failure_of(classify(serving))
        assert (failure.code, failure.reason) == (grpc.StatusCode.UNAVAILABLE, "DRAINING")
        assert not stopping.done()
    assert (await running).results[0].labels[0].label == "sports"
    await stopping


async def test_a_drain_sends_connections_away_while_their_calls_go_on(serving, busy, calls):
    with busy, Caller(serving.port) as caller:
        stream = caller.begin("/headway.v1.TextClassificationService/ClassifyText")
        caller.send(stream, frame(texts_pb.ClassifyTextRequest(texts=["goal"]).SerializeToString()))
        await until(lambda: calls.num_running == 1)
        stopping = asyncio.create_task(serving.server.stop())
        await asyncio.to_thread(caller.read, 1)
        assert caller.was_sent_away
        assert not stopping.done()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{serving.port}") as channel:
            stub = texts_grpc.TextClassificationServiceStub(channel)
            failure = await failure_of(stub.ClassifyText(texts_pb.ClassifyTextRequest(texts=["goal"])))
            assert failure.code is grpc.StatusCode.UNAVAILABLE
    await stopping


async def test_no_call_is_cancelled_by_a_drain(serving, calls):
    codes = set()

    async def caller():
        async with grpc.aio.insecure_channel(f"127.0.0.1:{serving.port}", options=OWN) as channel:
            stub = texts_grpc.TextClassificationServiceStub(channel)
            while grpc.StatusCode.UNAVAILABLE not in codes:
                try:
                    await stub.ClassifyText(texts_pb.ClassifyTextRequest(texts=["goal"]))
                except grpc.aio.AioRpcError as error:
                    codes.add(error.code())

    callers = [asyncio.create_task(caller()) for _ in range(40)]
    await asyncio.sleep(0.5)
    await serving.server.stop()
    await asyncio.gather(*callers)
    assert codes == {grpc.StatusCode.UNAVAILABLE}


async def test_a_health_watcher_is_told_of_the_drain(serving):
    watch = health_pb2_grpc.HealthStub(serving.channel).Watch(health_pb2.HealthCheckRequest())
    assert (await watch.read()).status == SERVING
    stopping = asyncio.create_task(serving.server.stop())
    assert (await watch.read()).status == NOT_SERVING
    await stopping


async def test_a_call_that_still_waits_after_the_drain_is_cut_off(serve, classifier_store):
    async with serve(classifier_store, drain_timeout=0.05) as serving:
        [model] = [model for model in serving.host.models if model.bundle.manifest.name == "topics"]
        with model._batcher._lanes:
            first = asyncio.ensure_future(classify(serving))  # taken by a thread and waiting for its turn
            await until(lambda: model._batcher._num_taken == 1)
            second = asyncio.ensure_future(classify(serving))  # still in the queue
            await until(lambda: len(model._batcher._queue) == 1)
            stopping = asyncio.create_task(serving.server.stop())
            failure = await failure_of(second)
            assert (failure.code, failure.reason) == (grpc.StatusCode.UNAVAILABLE, "DRAINING")
        assert (await first).results  # what runs is not interrupted
        await stopping
