"""GuideLLM."""
# /// script
# dependencies = ["guidellm==0.8.1", "torch==2.13.0"]
# ///

import json
from pathlib import Path

from cases import CHAT, HTTP, called, case, run, write_tokenizer

write_tokenizer(CHAT, Path("tokenizer"))


def benchmark(route, profile):
    output = Path(f"{route.strip('/').replace('/', '-')}.json")
    options = {
        "backend": f"kind=openai_http,target={HTTP},model={CHAT},request_format={route}",
        "profile": profile,
        "constraint": "kind=max_requests,count=6",
        "tokenizer": "kind=hf_auto,model=tokenizer",
        "data": "kind=synthetic_text,prompt_tokens=32,output_tokens=16",
        "output": f"kind=json,path={output}",
    }
    called("guidellm", "run", "--disable-console", *(f"--{name}={value}" for name, value in options.items()))
    [measured] = json.loads(output.read_text())["benchmarks"]
    totals = measured["metrics"]["request_totals"]
    assert (totals["successful"], totals["errored"]) == (6, 0), totals


@case("chats, concurrent")
def chats():
    benchmark("/v1/chat/completions", "kind=concurrent,streams=2")


@case("completions, one at a time")
def completions():
    benchmark("/v1/completions", "kind=synchronous")


run()
