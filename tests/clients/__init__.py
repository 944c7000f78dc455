"""Other people's clients, run unchanged against a server: `make test-clients`."""
