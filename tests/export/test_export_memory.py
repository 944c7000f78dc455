"""How much memory an export takes, in a process of its own."""

import subprocess
import sys

_EXPORTING = """
import re, sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, models

from headway_export.exporter import ExportOptions, export
from headway_export.source import ExportSource, limits_of
from headway_server.bundles import Architecture, Precision, SpecialTokens, Task
from headway_training.models.gpt import GPT, GPTConfig


def status(name):
    return int(re.search(rf"{name}:\\\\s+(\\\\d+)", Path("/proc/self/status").read_text())[1]) / 1024


def exported(store, **sizes):
    torch.manual_seed(0)
    module = GPT(GPTConfig(vocabulary_size=80, max_length=64, num_layers=2, num_heads=8, **sizes)).eval()
    source = ExportSource(
        name="random",
        task=Task.GENERATION,
        module=module,
        description="Random weights.",
        license="none",
        architecture=Architecture(kind="GPT", parameter_count=0, configuration={}),
        limits=limits_of(module, Task.GENERATION),
        tokenizer=Tokenizer(models.WordLevel({f"t{index}": index for index in range(80)}, "t3")),
        special_tokens=SpecialTokens(pad=0, bos=1, eos=2, unk=3),
    )
    export(source, ExportOptions(store=store, precisions=(Precision.FP32,)))
    return sum(parameter.nbytes for parameter in module.parameters()) / 2**20


folder = Path(sys.argv[1])
exported(folder / "small", d_model=64, d_ff=64)  # after which all libraries are there
before = status("VmRSS")
weights = exported(folder / "large", d_model=1024, d_ff=4096)
print(weights, status("VmHWM") - before)
"""


def test_an_export_takes_at_most_two_and_a_half_times_its_weights(tmp_path):
    """Of resident memory, mapped pages too: the module or the file that it reads, and what a session lays out."""
    command = [sys.executable, "-c", _EXPORTING, str(tmp_path)]
    weights, taken = map(float, subprocess.run(command, check=True, capture_output=True, text=True).stdout.split())
    assert 90 < weights < 120, "MiB: not a small model"
    assert taken < 2.5 * weights, f"{taken:.0f} MiB for weights of {weights:.0f}"
