"""Several processes that answer at one port (docs/scaling.md).

The kernel shares connections out among the workers, which all listen at the port (SO_REUSEPORT). A supervisor starts
them, replaces those that end, and drains them; one that has ended takes its workers with it: those that load are
killed, those that serve drain. What workers must agree on lies in memory that they share, and in a private folder.

shares      how many workers there are, and what each gets
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
