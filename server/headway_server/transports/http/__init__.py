"""HTTP: OpenAI's API, every call of the protocol by Connect, probes and metrics, on one port."""

from headway_server.transports.http.server import HttpServer

__all__ = ["HttpServer"]
