"""Python client, command line and load tester."""
