"""Addresses to listen on."""

from __future__ import annotations

import socket


def format_address(host: str, port: int) -> str:
    """Joins host and port; an IPv6 address goes into brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def address_problem(host: str, port: int) -> str | None:
    """Returns the reason why an address cannot be listened on, or None; for a check before models are loaded."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            probe.listen(1)  # on Linux a bind with SO_REUSEADDR succeeds beside another listener
    except OSError as error:
        return str(error.strerror or error)
    return None
