"""`python -m headway_training`: the command line, for launchers that start modules."""

from headway_training.cli import main

main()
