"""A store on Ray Serve: `serve run headway_ray:app store=models` (docs/ray.md).

`app` makes a deployment for each model, whose replicas run the serving layer of `headway_server`. `add_services` puts
the protocol into Serve's gRPC proxy. Ray is imported with the first of them: which deployment answers which call
(`placement.py`, `requests.py`) is known without it.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headway_ray.application import app
    from headway_ray.proxy import add_services

__all__ = ["add_services", "app"]

_MODULES = {"app": "headway_ray.application", "add_services": "headway_ray.proxy"}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)
