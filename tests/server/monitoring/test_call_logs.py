"""Log lines of calls: with the ids that name the call, and without what its caller wrote."""

import json

import pytest
import structlog
from rpc_failures import failure_of

from headway.v1 import text_classification_service_pb2 as pb
from headway_server.log import configure_logging
from headway_server.monitoring.access_log import AccessLog
from headway_server.serving.calls import Calls

TRACE = "0af7651916cd43dd8448eb211c80319c"
TRACEPARENT = ("traceparent", f"00-{TRACE}-b7ad6b7169203331-01")
SECRET = "what a caller wrote"


pytestmark = pytest.mark.usefixtures("logging_as_it_was")


def lines(capsys: pytest.CaptureFixture[str]) -> list[dict[str, object]]:
    return [json.loads(line) for line in capsys.readouterr().err.splitlines()]


async def test_every_line_of_a_call_has_its_ids_and_no_other_line_has(capsys):
    configure_logging(level="info", line_format="json")
    log = structlog.get_logger("ours")
    log.info("before")
    async with Calls().answer("/a/one", metadata=[TRACEPARENT], request_id="r-7"):
        log.info("within")
    async with Calls().answer("/a/two"):
        log.info("within the second")
    log.info("after")
    before, within, second, after = lines(capsys)
    assert (within["request_id"], within["trace_id"], within["call_id"]) == ("r-7", TRACE, 1)
    assert "trace_id" not in second
    assert second["call_id"] == 1  # of another `Calls`
    assert before.keys() == after.keys() == {"event", "level", "timestamp"}


async def test_an_internal_error_has_the_ids_of_its_call_and_no_message_unless_texts_are_asked_for(
    capsys, serve, classifier_store, monkeypatch
):
    def fail(*_arguments: object) -> None:
        try:
            raise KeyError(SECRET)
        except KeyError as error:
            raise ValueError(f"cannot read {SECRET!r}") from error

    for line_format in ("json", "text"):
        for texts in (False, True):
            configure_logging(level="warning", line_format=line_format, texts=texts)
            async with serve(classifier_store) as serving:
                monkeypatch.setattr(serving.host, "find", fail)
                request = pb.ClassifyTextRequest(texts=[SECRET])
                await failure_of(serving.texts.ClassifyText(request, metadata=[TRACEPARENT]))
            written = capsys.readouterr().err
            assert (SECRET in written) == texts
            assert TRACE in written
            assert "ValueError" in written
            assert "KeyError" in written
            assert "in fail" in written or '"name": "fail"' in written


@pytest.mark.parametrize("texts", [False, True])
async def test_the_access_log_has_one_line_a_call(capsys, serve, classifier_store, texts):
    configure_logging(level="info", line_format="json")
    async with serve(classifier_store, observer=AccessLog(texts=texts)) as serving:
        await serving.texts.ClassifyText(pb.ClassifyTextRequest(texts=["a star"]), metadata=[TRACEPARENT])
        await failure_of(serving.texts.ClassifyText(pb.ClassifyTextRequest(texts=["a"], model=SECRET)))
    good, bad = (line for line in lines(capsys) if line["event"] == "call")
    assert good["method"] == "/headway.v1.TextClassificationService/ClassifyText"
    assert (good["code"], good["model"], good["version"], good["trace_id"]) == ("OK", "topics", "1", TRACE)
    assert 0 < good["duration_ms"] < 60_000
    assert good["caller"].startswith("ipv4:127.0.0.1:")
    assert "reason" not in good
    assert (bad["code"], bad["reason"]) == ("NOT_FOUND", "MODEL_NOT_FOUND")
    assert (SECRET in str(bad)) == texts
    assert "a star" not in str(good)
