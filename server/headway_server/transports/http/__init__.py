"""HTTP: OpenAI's API, probes and metrics, on one port."""

from headway_server.transports.http.server import HttpServer

__all__ = ["HttpServer"]
