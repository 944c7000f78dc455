"""gRPC: one servicer a file."""
