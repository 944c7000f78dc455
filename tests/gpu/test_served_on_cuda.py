"""fp16 bundles of trained models, served on a GPU: close to PyTorch's fp32, whatever runs beside a call."""

import json
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from gpu_server import READY, serve, server_command
from tiny_models import PROVERBS

from headway_client import Client
from headway_export import reference
from headway_export.source import from_checkpoint

MAX_LOGIT_GAP = 0.1
"""How far below PyTorch's best logit that of a token may be which fp16 took for the best."""

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def client(fp16_store: Path, device: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    log = tmp_path_factory.mktemp("log") / "server.log"
    with serve(fp16_store, log, "--device", device, "--precision", "fp16", "--num-slots", "4") as line:
        assert f"models=2 rejected=0 device={device}" in line
        with Client(line.removeprefix(READY).split()[0]) as connected:
            yield connected


def largest_gap(logits: np.ndarray, chosen: list[int]) -> float:
    """Largest distance from PyTorch's best logit to that of the token chosen, over (T, V) logits."""
    return float((logits.max(axis=-1) - logits[np.arange(len(chosen)), chosen]).max())


def test_greedy_texts_are_close_to_pytorchs(client, tiny_checkpoints):
    source = from_checkpoint(tiny_checkpoints["generation"])
    # More calls than slots, of different lengths: slots are retired and moved while others run.
    calls = [(PROVERBS[3 * index : 3 * index + 2 + 4 * (index % 5)], 20 + 7 * (index % 8)) for index in range(24)]

    def generate(call: tuple[str, int]) -> str:
        prompt, count = call
        return client.generate_text([prompt], max_new_tokens=count, temperature=0)[0].text

    with ThreadPoolExecutor(len(calls)) as pool:
        texts = list(pool.map(generate, calls))
    assert len(set(texts)) > 15
    for (prompt, count), text in zip(calls, texts, strict=True):
        prompt_ids = source.tokenizer.encode(prompt, add_special_tokens=False).ids
        chosen = source.tokenizer.encode(text, add_special_tokens=False).ids
        assert len(chosen) == count
        logits = reference.generation_logits(source.module, np.array(prompt_ids + chosen))
        assert largest_gap(logits[len(prompt_ids) - 1 : -1], chosen) < MAX_LOGIT_GAP


def test_translations_are_close_to_pytorchs(client, tiny_checkpoints):
    source = from_checkpoint(tiny_checkpoints["translation"])
    lines = (tiny_checkpoints["translation"] / "evaluation.jsonl").read_text(encoding="utf-8").splitlines()
    texts = [json.loads(line)["source"] for line in lines[:24]]
    bos, eos = source.special_tokens.bos, source.special_tokens.eos
    for text, answer in zip(texts, client.translate_text(texts), strict=True):
        chosen = source.tokenizer.encode(answer.text, add_special_tokens=False).ids
        chosen += [eos] * (answer.finish_reason == "end_of_sequence")
        source_ids = np.array(source.tokenizer.encode(text).ids)
        logits = reference.translation_logits(source.module, source_ids, np.array([bos, *chosen[:-1]]))
        assert largest_gap(logits, chosen) < MAX_LOGIT_GAP


def test_an_fp32_decoder_on_cuda_is_refused_at_start_with_what_to_do(cuda, fp16_store):
    command, environment = server_command(fp16_store, "--device", "cuda", "--precision", "fp32")
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=environment)
    assert (ended.returncode, ended.stdout) == (2, "")
    message = ended.stderr.splitlines()[-1]
    assert "fp32 variant does not run on CUDA" in message
    assert "--precision fp16" in message
    assert "--device cpu" in message
