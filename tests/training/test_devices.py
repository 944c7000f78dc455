"""Training on several processes, or in parts of a batch, gives what one process gives."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import tiny_tasks
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from headway_training.cli import app
from headway_training.errors import RecipeError

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


@pytest.fixture(scope="module")
def pair(made_once, tmp_path_factory):
    """Two processes that learn all tasks, one after another; gives what each of them has found of a task."""
    root, folder = made_once("tiny-tasks", tiny_tasks.write_data), tmp_path_factory.mktemp("pair")
    process = tiny_tasks.start_pair(root, folder, [*tiny_tasks.TASKS, tiny_tasks.LONG_VALIDATION])

    def found(name: str, rank: int) -> dict[str, Any] | str:
        file = folder / f"{name}-{rank}.pt"
        while not file.is_file():
            assert process.poll() is None or file.is_file(), f"the processes ended: {process.communicate()[0]}"
            time.sleep(0.02)
        return torch.load(file, weights_only=True)

    yield root, found
    process.kill()
    process.communicate()


def assert_same(one: dict[str, Any], other: dict[str, Any], what: str) -> None:
    """Checks that gradients of a step, and losses and weights after two, are the same but for rounding."""
    for kind in ("gradients", "gradients of one row"):
        assert one[kind].keys() == other[kind].keys(), what  # the same weights have none
        largest = max(float(gradient.abs().max()) for gradient in one[kind].values())
        for name, gradient in one[kind].items():
            difference = float((gradient - other[kind][name]).abs().max())
            assert difference <= 1e-5 * largest, f"{what}: {kind}, {name}: {difference} of {largest} apart"
    assert other["loss"] == pytest.approx(one["loss"], rel=1e-5), what
    for name, tensor in one["state"].items():
        torch.testing.assert_close(
            other["state"][name], tensor, rtol=1e-5, atol=1e-6, msg=lambda message, n=name: f"{what}: {n}: {message}"
        )


REFUSED_PARTS = {
    "images and texts": "compares all rows of a batch",
    "images and texts by sigmoid": "compares all rows of a batch",
    "folder with batch norms": "normalises by the mean of a batch's rows",
}
"""Tasks whose batches cannot be worked through in parts, and why."""
REFUSED_PROCESSES = {"folder with batch norms": "normalises by the mean of a batch's rows"}


@pytest.mark.parametrize("name", tiny_tasks.TASKS)
def test_processes_and_parts_of_a_batch_of_any_task_learn_what_the_whole_batch_teaches(tmp_path, pair, name):
    root, found = pair
    whole = tiny_tasks.learn(name, root, tmp_path / "whole")
    parts = (name, root, tmp_path / "parts", "optimization.gradient_accumulation=2")
    if name in REFUSED_PARTS:
        with pytest.raises(RecipeError, match=REFUSED_PARTS[name]):
            tiny_tasks.learn(*parts)
    else:
        assert_same(whole, tiny_tasks.learn(*parts), "two parts")
    both = [found(name, rank) for rank in range(PROCESSES)]
    if name in REFUSED_PROCESSES:
        assert all(REFUSED_PROCESSES[name] in one for one in both)
        return
    assert all(isinstance(one, dict) for one in both), both
    assert_same(whole, both[0], "two processes")
    for key, tensor in both[0]["state"].items():
        assert torch.equal(tensor, both[1]["state"][key]), f"the processes hold different {key}"


def test_a_process_waits_for_a_validation_that_takes_longer_than_collectives_wait(pair):
    _, found = pair
    ranks = [found(tiny_tasks.LONG_VALIDATION, rank) for rank in range(PROCESSES)]
    assert ranks == [{"step": 5, "validations": 2}, {"step": 5, "validations": 0}]


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
        ended = [process.communicate(timeout=200)[0] for process in processes if process.poll() is not None]
        assert not ended, "\n".join(["the run ended before it wrote a state", *ended])
        time.sleep(0.05)
    processes[1].send_signal(signal.SIGTERM)
    outputs = [process.communicate(timeout=200)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * PROCESSES, "\n".join(outputs)
    steps = [re.findall(r"stopped by (.*) after step ([\d,]+) of", output) for output in outputs]
    assert [name for ((name, _),) in steps] == ["a signal to another process", "SIGTERM"]
    assert steps[0][0][1] == steps[1][0][1]
    (state,) = (tmp_path / "run" / "state").glob("step-*.pt")
    assert state.stem == f"step-{steps[0][0][1].replace(',', '')}"
