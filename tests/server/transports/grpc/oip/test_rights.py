"""Callers of the Open Inference Protocol have the rights of their keys."""

import pytest
from open_inference import text
from triton_client import TritonError

from headway_server.serving.access import format_grant, new_key
from headway_server.serving.host import ModelHost
from headway_server.settings import ServerSettings


@pytest.fixture(scope="module")
def keys() -> dict[str, str]:
    return {name: new_key() for name in ("topics", "admin")}


@pytest.fixture(scope="module")
def call(  # noqa: PLR0917 - pytest passes parameters by name
    serve_in_thread, runtime, classifier_store, keys, triton_calls, tmp_path_factory
):
    """Calls a server that knows two keys, with one of them or with none."""
    file = tmp_path_factory.mktemp("access") / "access.toml"
    grants = {"topics": {"scopes": ["model:topics"]}, "admin": {"scopes": ["admin"]}}
    file.write_text("".join(format_grant(name, keys[name], grant) for name, grant in grants.items()))
    settings = ServerSettings(store=classifier_store, port=0, access_file=file)
    served = serve_in_thread(lambda observer: ModelHost.open(runtime, settings, observer=observer), settings)

    def ask(name, *arguments, key=None, **options):
        headers = {"authorization": f"Bearer {keys[key]}"} if key else None
        return triton_calls(served.port, name, *arguments, headers=headers, **options)

    return ask


def code_of(call, *arguments, **options) -> str:
    with pytest.raises(TritonError) as caught:
        call(*arguments, **options)
    return caught.value.code.removeprefix("StatusCode.")


def test_a_key_opens_its_models_and_no_others(call):
    goal = {"text": text("goal")}
    assert call("infer", "topics", goal, key="topics").arrays["label"][0, 0] == b"sports"
    assert code_of(call, "infer", "topics", goal) == "UNAUTHENTICATED"
    assert code_of(call, "infer", "colours", {"image": text("a")}, key="topics") == "PERMISSION_DENIED"
    assert code_of(call, "infer", "topics", goal, key="admin") == "PERMISSION_DENIED"


def test_a_stream_needs_a_key_and_each_of_its_requests_the_right(call):
    goal, image = ("topics", {"text": text("goal")}, {}), ("colours", {"image": text("a")}, {})
    received = call("stream", [goal, image], key="topics")
    assert [answer.arrays["label"][0, 0] for answer in received.answers] == [b"sports"]
    [(code, message)] = received.errors
    assert code is None
    assert "colours" in message
    [(code, _)] = call("stream", [goal]).errors
    assert code == "StatusCode.UNAUTHENTICATED"


def test_loading_needs_the_scope_admin_and_probes_need_nothing(call):
    assert code_of(call, "ask", "load_model", "topics", key="topics") == "PERMISSION_DENIED"
    call("ask", "load_model", "topics", key="admin")
    assert code_of(call, "ask", "unload_model", "topics") == "UNAUTHENTICATED"
    assert call("ask", "is_server_ready")
    assert call("ask", "is_model_ready", "topics")
