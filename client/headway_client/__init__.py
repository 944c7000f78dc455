"""Python client, command line and load tester of the headway API.

Names are imported on first access: the command line must set gRPC's environment before gRPC is imported, and a library
must not.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headway_client.names import *  # noqa: F403 (which lists what it has)
else:

    def __getattr__(name: str) -> Any:
        if find_spec(f"{__name__}.{name}") is not None:
            return import_module(f"{__name__}.{name}")
        names = import_module(f"{__name__}.names")
        if name == "__all__" or name in names.__all__:
            return getattr(names, name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__() -> list[str]:
        return sorted({*globals(), *import_module(f"{__name__}.names").__all__})
