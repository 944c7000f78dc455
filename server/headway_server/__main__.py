"""`python -m headway_server`."""

from headway_server.cli import main

main()
