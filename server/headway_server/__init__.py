"""Serves bundles over gRPC on ONNX Runtime."""

import os

# gRPC's core writes to stderr by itself and quotes what a peer sent; what fails raises an error besides. It reads this
# when it is imported.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
