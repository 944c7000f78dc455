"""Settings for loading a bundle by itself, as the families' loaders take them."""

from headway_server.settings import ServerSettings


def loading(**fields: object) -> ServerSettings:
    """Settings of a server whose store is never read: `loading(precision="int8")`."""
    return ServerSettings(store="unused", **fields)
