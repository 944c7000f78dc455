"""The Open Inference Protocol. Made by `make proto` from the .proto file beside it, but for this file.

Servers import it, clients do not: its names are those of every client of the protocol, and a process holds one file that
declares them.
"""
