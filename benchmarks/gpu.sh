#!/usr/bin/env bash
# Everything that needs an NVIDIA GPU, in one run and without a network:
#   benchmarks/gpu.sh WHEELS OUTPUT [--device cuda|cpu] [--steps N] [--rounds N] [--seconds S]
#
# WHEELS is a folder of wheels to install (docs/gpu.md says which); `-` installs none and takes what PYTHON has.
# OUTPUT gets summary.md, a log of every step, and benchmark.json. --device cpu tries the script where there is no GPU.
# PYTHON names the interpreter (default: python3). HEADWAY_DATA_DIR names the recipes' data; what is not there is
# replaced by data that gpu_data.py makes. A step that fails does not keep the others from running.
set -uo pipefail

usage() {
    sed -n '2,9s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" >&2
    exit 2
}

[[ $# -ge 2 ]] || usage
wheels="$1" output="$2"
shift 2
device=cuda steps=200 rounds=3 seconds=2
while [[ $# -gt 0 ]]; do
    [[ $# -ge 2 ]] || usage
    case "$1" in
        --device) device="$2" ;;
        --steps) steps="$2" ;;
        --rounds) rounds="$2" ;;
        --seconds) seconds="$2" ;;
        *) usage ;;
    esac
    shift 2
done
[[ "$device" == cuda || "$device" == cpu ]] || usage
[[ "$wheels" == - || -d "$wheels" ]] || { echo "gpu.sh: $wheels: there is no such folder" >&2; exit 2; }

python="${PYTHON:-python3}"
mkdir -p "$output" || exit 2
output="$(cd "$output" && pwd)"
if [[ "$wheels" != - ]]; then wheels="$(cd "$wheels" && pwd)"; fi
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 2
export ORT_DISABLE_TELEMETRY=1 PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
summary="$output/summary.md"
failed=()

# Runs a step with a log of its own and adds a line to the summary.
step() {
    local name="$1" begun=$SECONDS verdict=passed code
    shift
    echo "== $name"
    "$@" >"$output/$name.log" 2>&1
    code=$?
    if [[ $code -ne 0 ]]; then
        verdict="FAILED (exit code $code)"
        failed+=("$name")
        tail -n 30 "$output/$name.log"
    fi
    echo "| $name | $verdict | $((SECONDS - begun)) s |" | tee -a "$summary"
}

install() {
    # Into a folder of its own, before what the interpreter has: nothing of the machine is changed.
    "$python" -m pip install --no-index --no-deps --upgrade --no-compile --no-cache-dir --disable-pip-version-check \
        --target "$work/site" "$wheels"/*.whl
}

describe() {
    if [[ "$device" == cuda ]]; then nvidia-smi || return 1; fi
    "$python" - "$device" <<'PYTHON'
import sys
from importlib.metadata import version

import onnxruntime
import torch

from headway_server.runtime import Runtime

print(Runtime(device=sys.argv[1]), "providers:", ", ".join(onnxruntime.get_available_providers()))
print("torch", torch.__version__, "CUDA", torch.version.cuda, "available:", torch.cuda.is_available())
for name in ("numpy", "grpcio", "protobuf", "tokenizers", "headway-server"):
    print(name, version(name))
if sys.argv[1] == "cuda":
    assert torch.cuda.is_available(), "torch sees no GPU: the recipes would be trained on the CPU"
PYTHON
}

# Folders of the CUDA libraries that come with torch. ONNX Runtime looks for them beside itself, and it is installed in a
# folder of its own.
cuda_libraries() {
    "$python" - <<'PYTHON'
import importlib.util
from pathlib import Path

nvidia = importlib.util.find_spec("nvidia")
roots = list(nvidia.submodule_search_locations or ()) if nvidia else []
print(":".join(str(folder) for root in roots for folder in sorted(Path(root).glob("*/lib"))))
PYTHON
}

gpu_tests() {
    # Warnings are no errors here: the machine's libraries may be others than those that are pinned.
    HEADWAY_GPU_TESTS_DEVICE="$device" "$python" -m pytest -m gpu -W default -p no:cacheprovider -v tests/gpu ||
        return 1
    # Where a GPU is asked for, a test that was skipped has proved nothing.
    [[ "$device" == cpu ]] || ! grep -q SKIPPED "$output/gpu-tests.log"
}

# train NAME RECIPE DATA_FOLDER OWN_DATA [--set ...]: a few steps in bf16, as the recipe says.
train() {
    local name="$1" recipe="$2" folder="$3" own="$4"
    shift 4
    local data=(--data-dir "${HEADWAY_DATA_DIR:-}")
    if [[ -z "${HEADWAY_DATA_DIR:-}" || ! -d "$HEADWAY_DATA_DIR/$folder" ]]; then
        data=(--train "$work/data/train$own" --valid "$work/data/valid$own")
    fi
    "$python" -m headway_training run "$recipe" "${data[@]}" --output "$work/runs/$name" --max-steps "$steps" \
        --set "name=$name" --set optimization.precision=bf16 --set optimization.evaluations=2 "$@" || return 1
    "$python" - "$work/runs/$name/checkpoint/checkpoint.json" "$device" <<'PYTHON'
import json
import sys

training = json.load(open(sys.argv[1]))["training"]
print(json.dumps({key: training[key] for key in ("hardware", "step_count", "wall_time_s", "metrics")}))
on_cpu = training["hardware"].endswith((" core", " cores"))
assert on_cpu == (sys.argv[2] == "cpu"), f"trained on {training['hardware']}"
PYTHON
}

# export_bundle NAME: fp16 for the GPU, proved there; beside it fp32, which is what the CPU runs.
export_bundle() {
    "$python" -c 'from headway_export.cli import app; app()' "$work/runs/$1/checkpoint" --store "$work/store" \
        --precision fp32 --precision fp16 || return 1
    "$python" - "$work/store/$1/1/bundle.json" <<'PYTHON'
import json
import sys

for precision, variant in json.load(open(sys.argv[1]))["variants"].items():
    print(precision, json.dumps({key: variant[key] for key in ("parity", "quality")}))
PYTHON
}

benchmark() {
    "$python" -m benchmarks shipped --store "$work/store" --device "$device" --rounds "$rounds" --seconds "$seconds" \
        --output "$output/benchmark.json"
}

printf '# GPU run, device %s, %s\n\n| step | outcome | time |\n|---|---|---|\n' "$device" "$(date -u +%FT%TZ)" >"$summary"
if [[ "$wheels" != - ]]; then
    export PYTHONPATH="$work/site${PYTHONPATH:+:$PYTHONPATH}"
    step install install
fi
if [[ "$device" == cuda ]]; then
    libraries="$(cuda_libraries)"
    export LD_LIBRARY_PATH="${libraries}${libraries:+:}${LD_LIBRARY_PATH:-}"
fi
step describe describe
step gpu-tests gpu_tests
step data "$python" -m benchmarks.gpu_data "$work/data"

names=(shakespeare translation news pictures)
step train-shakespeare train shakespeare tiny-shakespeare tinyshakespeare .txt
step train-translation train translation multi30k-en-de multi30k .tsv
step train-news train news ag-news ag_news .csv
step train-pictures train pictures cifar10 cifar10 -pictures
if [[ "$device" == cuda ]]; then
    # The layers of GPT-3 Small: large enough for the GPU to have something to do.
    names+=(gpt-small-size)
    step train-gpt-small-size train gpt-small-size tiny-shakespeare tinyshakespeare .txt \
        --set model.configuration=gpt3-small --set model.max_length=512 --set optimization.learning_rate=3e-4
fi
for name in "${names[@]}"; do
    if [[ -d "$work/runs/$name/checkpoint" ]]; then step "export-$name" export_bundle "$name"; fi
done
if [[ -d "$work/store" ]]; then step benchmark benchmark; fi

{
    printf '\n'
    for log in describe "${names[@]/#/train-}" "${names[@]/#/export-}" gpu-tests benchmark; do
        if [[ -f "$output/$log.log" ]]; then
            printf '\n## %s\n\n```\n' "$log"
            tail -n 60 "$output/$log.log"
            printf '```\n'
        fi
    done
} >>"$summary"
echo "written to $output"
if [[ ${#failed[@]} -gt 0 ]]; then
    echo "gpu.sh: failed: ${failed[*]}" >&2
    exit 1
fi
