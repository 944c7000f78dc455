#!/usr/bin/env bash
# Generates the Python stubs beside the .proto files. Run it in the project's environment after changing one:
#   make proto
set -euo pipefail
cd "$(dirname "$0")"
out="${1:-.}"
services="headway/v1/*_service.proto headway/oip/*.proto"
python -m grpc_tools.protoc --proto_path=. --python_out="$out" --mypy_out="quiet:$out" headway/v1/*.proto headway/oip/*.proto
python -m grpc_tools.protoc --proto_path=. --grpc_python_out="$out" --mypy_grpc_out="quiet:$out" $services
