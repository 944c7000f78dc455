"""lm-evaluation-harness: `local-completions` and `local-chat-completions`."""
# /// script
# dependencies = ["lm-eval[api]==0.4.13", "transformers==5.24.0", "datasets==5.2.0"]
# ///

import json
import math
import os
from pathlib import Path

os.environ |= {"HF_HUB_OFFLINE": "1", "OPENAI_API_KEY": "none"}

from cases import BASE, CHAT, case, run, write_tokenizer
from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager

write_tokenizer(CHAT, Path("tokenizer"))
Path("lines.jsonl").write_text(
    "".join(
        json.dumps({"text": text, "choices": ["speak", "walk"], "answer": 0}) + "\n"
        for text in ("Before we proceed any further, hear me", "You are all resolved rather to die than to")
    )
)
COMMON = {
    "dataset_path": "json",
    "dataset_kwargs": {"data_files": {"test": str(Path("lines.jsonl").resolve())}},
    "test_split": "test",
    "num_fewshot": 0,
    "metadata": {"version": 1},
}
TASKS = {
    "told": {
        "output_type": "generate_until",
        "doc_to_text": "{{text}}",
        "doc_to_target": "{{choices[answer]}}",
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": 12, "do_sample": False},
        "metric_list": [{"metric": "exact_match"}],
    },
    "chosen": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{text}}",
        "doc_to_choice": "choices",
        "doc_to_target": "answer",
        "metric_list": [{"metric": "acc"}],
    },
    "rolled": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "word_perplexity"}],
    },
}
for name, fields in TASKS.items():
    Path(f"{name}.yaml").write_text(json.dumps({"task": name, **COMMON, **fields}))  # JSON is YAML


def evaluate(task, metric, kind="local-completions", **arguments):
    path = "chat/completions" if kind == "local-chat-completions" else "completions"
    common = {"base_url": f"{BASE}/{path}", "num_concurrent": 2, "max_retries": 1}
    results = simple_evaluate(
        model=kind,
        model_args={**common, **arguments},
        tasks=[task],
        task_manager=TaskManager(include_path=".", include_defaults=False),
        bootstrap_iters=0,
        apply_chat_template=kind == "local-chat-completions",
    )
    return results["results"][task][f"{metric},none"]


SERVED = {"model": CHAT, "tokenizer": "tokenizer", "tokenizer_backend": "huggingface", "max_length": 2048}


@case("generation")
def generation():
    assert 0 <= evaluate("told", "exact_match", **SERVED) <= 1


@case("generation of chats")
def chats():
    arguments = {"model": CHAT, "tokenizer_backend": None, "tokenized_requests": False}
    assert evaluate("told", "exact_match", "local-chat-completions", **arguments) == 0


@case("multiple choice")
def choice():
    assert 0 <= evaluate("chosen", "acc", **SERVED) <= 1


@case("rolling log-likelihood")
def rolling():
    assert 1 < evaluate("rolled", "word_perplexity", **SERVED) < math.inf


@case("the server's tokenizer", fails="there is no `/tokenizer_info`")
def remote():
    arguments = {"model": CHAT, "tokenizer_backend": "remote", "max_length": 2048}
    assert 0 <= evaluate("chosen", "acc", **arguments) <= 1


run()
