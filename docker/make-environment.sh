#!/usr/bin/env bash
# Makes the Python environment of one image, from built wheels and pinned versions:
#   docker/make-environment.sh server-cpu|server-gpu|client FOLDER
# The Dockerfile and the tests run this same script. PYTHON names the interpreter (default: python3).
set -euo pipefail

target="${1:-}"
folder="${2:-}"
python="${PYTHON:-python3}"
if [[ -z "$folder" || ! "$target" =~ ^(server-cpu|server-gpu|client)$ ]]; then
    echo "usage: $0 server-cpu|server-gpu|client FOLDER" >&2
    exit 2
fi
if [[ "$folder" != /* ]]; then folder="$PWD/$folder"; fi
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# The same sources and versions give the same bytes wherever and whenever they are installed into the same folder.
export SOURCE_DATE_EPOCH="${SOURCE_DATE_EPOCH:-1577836800}" PYTHONHASHSEED=0
scratch="$folder.build" # not a random name, because pip writes down where a wheel lay
mkdir "$scratch"
trap 'rm -rf "$scratch"' EXIT
constraints=(--constraint constraints.txt)
if [[ "$target" == server-gpu ]]; then constraints+=(--constraint docker/constraints-gpu.txt); fi

# pip stays outside of both environments: it works on them through --python.
pip_for() {
    local environment="$1"
    shift
    "$python" -m pip --python "$environment/bin/python" --disable-pip-version-check --no-input --quiet "$@"
}

"$python" -m venv --without-pip "$scratch/build"
pip_for "$scratch/build" install --constraint constraints.txt hatchling
distribution="${target%%-*}" # server or client
pip_for "$scratch/build" wheel --no-deps --no-build-isolation --wheel-dir "$scratch/wheels" ./proto "./$distribution"

# Wheels are given by path, so that no index can answer for the project's own names.
proto_wheel="$(echo "$scratch"/wheels/headway_proto-*.whl)"
own_wheel="$(echo "$scratch/wheels/headway_$distribution"-*.whl)"
case "$target" in
    server-cpu) wheels=("$proto_wheel" "${own_wheel}[cpu,http,signing,speech,tracing]") ;;
    # The second extra brings the CUDA and cuDNN libraries that ONNX Runtime loads.
    server-gpu) wheels=("$proto_wheel" "${own_wheel}[gpu,http,signing,speech,tracing]" "onnxruntime-gpu[cuda,cudnn]") ;;
    client) wheels=("$proto_wheel" "${own_wheel}[load]") ;;
esac
"$python" -m venv --without-pip "$folder"
# Only wheels: an image has no compiler, and a source build would not be what was tested.
pip_for "$folder" install --only-binary=:all: --no-compile "${constraints[@]}" "${wheels[@]}"
cp LICENSE "$folder/"
if [[ "$distribution" == server ]]; then cp docker/health_probe.py "$folder/"; fi
# Bytecode by default holds its source's time, which is that of the installation.
"$folder/bin/python" -S -m compileall -q --invalidation-mode unchecked-hash "$folder/lib"
find "$folder" -exec touch --no-dereference --date="@$SOURCE_DATE_EPOCH" {} +
