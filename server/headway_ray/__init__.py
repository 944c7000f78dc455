"""A store on Ray Serve: `serve run headway_ray:app store=models` (docs/ray.md).

`app` makes a deployment for each model, whose replicas run the serving layer of `headway_server`. `add_services` puts
the protocol into Serve's gRPC proxy.
"""

from headway_ray.application import app
from headway_ray.proxy import add_services

__all__ = ["add_services", "app"]
