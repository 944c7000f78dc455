"""LangChain's standard tests of an integration."""
# /// script
# dependencies = ["langchain-openai==1.7.4", "langchain-tests==1.1.9"]
# ///

from pathlib import Path

import pytest
from cases import BASE, CHAT, VECTORS, case, run

FILE = Path("test_standard.py")
FILE.write_text(f"""
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from langchain_tests.integration_tests import ChatModelIntegrationTests, EmbeddingsIntegrationTests

COMMON = {{"base_url": "{BASE}", "api_key": "none", "max_retries": 0}}

class TestChat(ChatModelIntegrationTests):
    chat_model_class = ChatOpenAI
    chat_model_params = {{"model": "{CHAT}", "stream_usage": True, **COMMON}}

class TestEmbeddings(EmbeddingsIntegrationTests):
    embeddings_class = OpenAIEmbeddings
    embedding_model_params = {{"model": "{VECTORS}", "check_embedding_ctx_length": False, **COMMON}}
""")
SAME_LOOP = [
    "asyncio_mode=auto",
    "asyncio_default_fixture_loop_scope=session",
    "asyncio_default_test_loop_scope=session",
]
"""The client keeps its connections, which belong to a loop."""
UNICODE = "test_unicode_tool_call_integration"


class Results:
    """What has failed, and how many tests have passed."""

    def __init__(self):
        self.failed, self.num_passed = [], 0

    def pytest_runtest_logreport(self, report):
        self.num_passed += report.when == "call" and report.passed
        if report.failed:
            self.failed.append(f"{report.nodeid.rpartition('::')[2]}: {str(report.longrepr)[-300:]}")


def run_tests(chosen, at_least):
    results = Results()
    options = [part for option in SAME_LOOP for part in ("-o", option)]
    pytest.main(["-p", "no:cacheprovider", *options, "-k", chosen, str(FILE)], [results])
    assert not results.failed, "\n".join(results.failed)
    assert results.num_passed >= at_least, results.num_passed


@case("chat models (37 tests)")
def chat_models():
    run_tests(f"TestChat and not {UNICODE}", 37)


@case("embeddings (5 tests)")
def embeddings():
    run_tests("TestEmbeddings", 5)


@case("Unicode in a call", fails="it wants a name from the prompt, which the untrained model does not say")
def unicode():
    run_tests(UNICODE, 1)


run()
