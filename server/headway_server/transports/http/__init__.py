"""HTTP: OpenAI's API, every method by the Connect protocol, probes and metrics, on one port."""

from headway_server.transports.http.openai import OPENAI_ABILITIES, read_form
from headway_server.transports.http.server import HttpServer

__all__ = ["OPENAI_ABILITIES", "HttpServer", "read_form"]
