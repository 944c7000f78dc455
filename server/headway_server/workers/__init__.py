"""Several processes that answer at one port (docs/scaling.md).

The kernel distributes connections among the workers, which all listen on the port (SO_REUSEPORT). A supervisor starts,
restarts and drains the workers. If the supervisor ends, loading workers are killed and serving ones drain. Shared state
is in shared memory and in a private folder.

shares      number of workers, and the resources of each
agreement   what workers agree on
folder      the folder that they share
host        the models of a worker, which follows the others
metrics     the metrics of all workers, at one port
worker      a worker's part
supervisor  the supervisor's
"""

from headway_server.workers.shares import choose_workers
from headway_server.workers.supervisor import supervise
from headway_server.workers.worker import Ready, Worker

__all__ = ["Ready", "Worker", "choose_workers", "supervise"]
