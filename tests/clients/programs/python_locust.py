"""Locust, with OpenAI's package and by HTTP."""
# /// script
# dependencies = ["locust==2.47.0", "openai==2.54.0"]
# ///

import json
from pathlib import Path

from cases import BASE, CHAT, HTTP, SENTENCE, called, case, run

FILES = {
    "HTTP": f"""
from locust import HttpUser, task

class Caller(HttpUser):
    @task
    def ask(self):
        body = {{"model": "{CHAT}", "messages": [{{"role": "user", "content": "Who sat?"}}]}}
        with self.client.post("/v1/chat/completions", json=body, catch_response=True) as answer:
            if answer.json()["choices"][0]["message"]["content"] != "{SENTENCE}":
                answer.failure(answer.text)
""",
    "OpenAI's package": f"""
from locust import task
from locust.contrib.oai import OpenAIUser

class Caller(OpenAIUser):
    @task
    def ask(self):
        with self.client.rename_request("ask"):
            self.client.chat.completions.create(
                model="{CHAT}", messages=[{{"role": "user", "content": "Who sat?"}}]
            )
""",
}


OPENAI = {"OPENAI_API_KEY": "none", "OPENAI_BASE_URL": BASE}


def load(name):
    file = Path(f"locust_{list(FILES).index(name)}.py")
    file.write_text(FILES[name])
    options = "--headless --json --users 4 --spawn-rate 4 --run-time 4s --stop-timeout 4s"
    measured = json.loads(called("locust", "-f", file, *options.split(), "--host", HTTP, **OPENAI))
    assert sum(entry["num_requests"] for entry in measured) > 4, measured
    assert not any(entry["num_failures"] for entry in measured), measured


for name in FILES:
    case(name)(lambda name=name: load(name))

run()
