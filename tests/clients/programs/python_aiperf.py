"""aiperf."""
# /// script
# dependencies = ["aiperf==0.13.0"]
# ///

import json
from pathlib import Path

from cases import CHAT, HTTP, VECTORS, called, case, run, write_tokenizer

TOKENIZER = Path("tokenizer").resolve()
write_tokenizer(CHAT, TOKENIZER)
LOAD = "--request-count 8 --concurrency 2 --random-seed 1 --ui-type none --no-gpu-telemetry"


def profile(endpoint, model, *options):
    folder = Path(endpoint)
    asked = f"--model {model} --url {HTTP} --endpoint-type {endpoint} --tokenizer {TOKENIZER} --artifact-dir {folder}"
    called("aiperf", "profile", *asked.split(), *LOAD.split(), *options)
    [file] = folder.rglob("profile_export_aiperf.json")
    measured = json.loads(file.read_text())
    assert measured["request_count"]["avg"] == 8, measured
    assert not measured.get("error_summary"), measured["error_summary"]
    return measured


TEXT = ["--isl", "32", "--osl", "16"]


@case("chats, streamed, with the server's counts")
def chat():
    measured = profile("chat", CHAT, "--streaming", "--use-server-token-count", *TEXT)
    assert measured["time_to_first_token"]["avg"] > 0


@case("completions")
def completions():
    profile("completions", CHAT, *TEXT, "--extra-inputs", "ignore_eos:true")


@case("embeddings")
def embeddings():
    profile("embeddings", VECTORS, "--isl", "16")


run()
