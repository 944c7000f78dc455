"""What the log lines of a server hold, and what they must never hold."""

import json
import logging
import os
import sys
from io import StringIO

import pytest
import structlog
from grpc._cython import cygrpc

from headway_server.log import configure_logging

SECRET = "what a caller wrote"


pytestmark = pytest.mark.usefixtures("logging_as_it_was")


def fail_with_a_local_value() -> Exception:
    text = "-".join(SECRET.split())  # only a local's value reads like this
    try:
        raise KeyError(len(text))
    except KeyError as error:
        return error


@pytest.mark.parametrize("line_format", ["text", "json"])
def test_a_logged_error_shows_where_it_was_raised_and_no_values_of_locals(capsys, line_format):
    configure_logging(level="info", line_format=line_format)
    error = fail_with_a_local_value()
    structlog.get_logger("ours").error("internal error", exc_info=error)
    logging.getLogger("theirs").error("broken", exc_info=error)
    written = capsys.readouterr().err
    assert written.count("fail_with_a_local_value") == 2
    assert "-".join(SECRET.split()) not in written


def test_json_lines_are_one_object_each_even_with_an_error(capsys):
    configure_logging(level="info", line_format="json")
    structlog.get_logger().error("internal error", exc_info=fail_with_a_local_value())
    [line] = capsys.readouterr().err.splitlines()
    [error] = json.loads(line)["exception"]
    assert error["exc_type"] == "KeyError"
    assert "locals" not in str(error)


def test_a_deep_recursion_is_logged_by_its_ends(capsys):
    def recurse(depth: int) -> None:
        if depth == 0:
            raise ValueError("deep")
        recurse(depth - 1)

    configure_logging(level="info", line_format="json")
    try:
        recurse(300)
    except ValueError as error:
        structlog.get_logger().error("internal error", exc_info=error)
    [error] = json.loads(capsys.readouterr().err)["exception"]
    assert len(error["frames"]) <= 21


@pytest.mark.parametrize("line_format", ["text", "json"])
def test_what_a_caller_sent_begins_no_line_of_its_own(capsys, line_format):
    forged = 'x\n{"event": "FORGED"}\r\x1b[2J\x85\u2028FORGED'
    configure_logging(level="info", line_format=line_format)
    log = structlog.get_logger()
    log.info("call", method=forged)
    log.info(forged)
    logging.getLogger("theirs").error("method %s", forged)
    try:
        raise ValueError(forged)
    except ValueError as error:
        log.error("internal error", exc_info=error)
        logging.getLogger("theirs").exception(forged)
    written = capsys.readouterr().err
    assert not set(written) & set("\r\x1b\x85\u2028")
    for line in written.split("\n"):
        assert "FORGED" not in line[:12], line
        if line_format == "text":
            assert not line or line.startswith(("20", " | ")), line


class BrokenStream(StringIO):
    def write(self, _text: str) -> int:
        raise BrokenPipeError(32, "Broken pipe")


@pytest.mark.parametrize("line_format", ["text", "json"])
def test_a_log_that_nobody_reads_breaks_nothing(monkeypatch, line_format):
    monkeypatch.setattr(sys, "stderr", BrokenStream())
    configure_logging(level="info", line_format=line_format)
    structlog.get_logger().error("internal error", exc_info=fail_with_a_local_value())
    logging.getLogger("theirs").error("broken")


def test_a_log_whose_stream_is_closed_breaks_nothing(monkeypatch):
    stream = StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    configure_logging(level="info", line_format="text")
    stream.close()
    structlog.get_logger().error("nobody reads this")
    logging.getLogger("theirs").error("nor this")


def test_a_caller_that_goes_while_it_is_written_to_is_not_an_error_of_the_server(capsys):
    configure_logging(level="info", line_format="text")
    library = logging.getLogger("grpc._cython.cygrpc")
    library.error("Unexpected error", exc_info=cygrpc.ExecuteBatchError("failed"))
    assert capsys.readouterr().err == ""
    library.error("Unexpected error", exc_info=KeyError("bug"))
    assert "bug" in capsys.readouterr().err


def test_a_log_that_nobody_reads_delays_nobody(monkeypatch):
    reader, writer = os.pipe()
    with os.fdopen(reader, "rb") as read, os.fdopen(writer, "w", encoding="utf-8") as written:
        monkeypatch.setattr(sys, "stderr", written)
        configure_logging(level="info", line_format="json")
        for number in range(2000):
            structlog.get_logger().info("a line", number=number, text="x" * 3000)
        written.close()
        assert read.read().startswith(b'{"number": 0')
