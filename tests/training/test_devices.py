"""Training on several processes gives what one process gives."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from headway_training.cli import app

PROCESSES = 2
EXACT = (
    "optimization.precision=fp32",
    "model.dropout=0",
    "augmentation.token_dropout=0",
    "optimization.epochs=2",
    "optimization.evaluations=1",  # the best weights are written at the very end, and every process reads them
)

WORKER = """
import sys
import torch.distributed
# Processes meet at a file, so that nothing listens but on the loopback interface.
torch.distributed.init_process_group("gloo", init_method=sys.argv.pop(1), rank=RANK, world_size=WORLD)
from headway_training.cli import app
app(sys.argv[1:], standalone_mode=False)
torch.distributed.destroy_process_group()
"""


def start(arguments: list[str], rank: int, meeting: Path) -> subprocess.Popen[str]:
    """Starts one process of a training run."""
    code = WORKER.replace("RANK", str(rank)).replace("WORLD", str(PROCESSES))
    environment = {
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(PROCESSES),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
    }
    words = [sys.executable, "-c", code, meeting.as_uri(), *arguments]
    return subprocess.Popen(words, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def test_two_processes_learn_what_one_learns(tmp_path, reviews, tiny_settings):
    words = ["run", "ag-news", "--train", str(reviews), "--valid", str(reviews)]
    for setting in (*tiny_settings["ag-news"], *EXACT):
        words += ["--set", setting]
    processes = [start([*words, "--output", str(tmp_path / "two")], i, tmp_path / "meeting") for i in range(PROCESSES)]
    alone = CliRunner().invoke(app, [*words, "--output", str(tmp_path / "one")], catch_exceptions=False)
    outputs = [process.communicate(timeout=200)[0] for process in processes]
    assert alone.exit_code == 0, alone.output
    assert [process.returncode for process in processes] == [0] * PROCESSES, "\n".join(outputs)
    assert sum("export it with" in text for text in outputs) == 1  # one process speaks
    one, two = (load_file(tmp_path / name / "checkpoint" / "model.safetensors") for name in ("one", "two"))
    assert one.keys() == two.keys()
    for name, tensor in one.items():
        torch.testing.assert_close(two[name], tensor, rtol=1e-3, atol=1e-5)


def test_a_signal_to_one_process_stops_all_after_the_same_step(tmp_path, reviews, tiny_settings):
    words = ["run", "ag-news", "--train", str(reviews), "--valid", str(reviews), "--output", str(tmp_path / "run")]
    for setting in (*tiny_settings["ag-news"], "optimization.epochs=5000", "optimization.state_every_steps=5"):
        words += ["--set", setting]
    processes = [start(words, i, tmp_path / "meeting") for i in range(PROCESSES)]
    while not list((tmp_path / "run" / "state").glob("step-*.pt")):
        assert all(process.poll() is None for process in processes), "the run ended before it wrote a state"
        time.sleep(0.05)
    processes[1].send_signal(signal.SIGTERM)
    outputs = [process.communicate(timeout=200)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * PROCESSES, "\n".join(outputs)
    steps = [re.findall(r"stopped by (.*) after step ([\d,]+) of", output) for output in outputs]
    assert [name for ((name, _),) in steps] == ["a signal to another process", "SIGTERM"]
    assert steps[0][0][1] == steps[1][0][1]
    (state,) = (tmp_path / "run" / "state").glob("step-*.pt")
    assert state.stem == f"step-{steps[0][0][1].replace(',', '')}"
