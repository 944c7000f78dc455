"""The table of abilities: every RPC of the protocols and every task has its place in it."""

import pytest

from headway_server.bundles import Task
from headway_server.serving.abilities import RPCS, Ability
from headway_server.transports.grpc import service_descriptors
from headway_server.transports.grpc.oip.tasks import TASKS
from headway_server.transports.grpc.server import service_tasks
from headway_server.transports.http import OPENAI_ABILITIES

METHODS = {method.name: method for service in service_descriptors() for method in service.methods}


def test_every_rpc_of_every_service_has_an_entry_and_no_two_have_one_name():
    assert RPCS.keys() == METHODS.keys()
    assert len(METHODS) == sum(len(service.methods) for service in service_descriptors())


@pytest.mark.parametrize("name", RPCS)
def test_the_fields_that_an_entry_names_are_fields_of_the_request(name):
    fields = set(METHODS[name].input_type.fields_by_name.keys())
    assert RPCS[name].with_field.keys() <= fields
    if any(RPCS[name].abilities):
        assert METHODS[name].input_type.name == f"{name}Request"  # by which servicers find the entry
        assert {"model", "model_version"} <= fields


def test_every_task_is_asked_for_by_an_rpc_and_has_tensors():
    asked = {task for rpc in RPCS.values() for ability in rpc.abilities for task in ability.tasks}
    assert asked == TASKS.keys() == set(Task)


def test_a_service_is_healthy_by_the_models_that_its_calls_ask_for():
    tasks = {service.name: service_tasks(service) for service in service_descriptors()}
    assert tasks["TextClassificationService"] == {
        Task.TEXT_CLASSIFICATION,
        Task.TOKEN_CLASSIFICATION,
        Task.TEXT_EMBEDDING,
        Task.TEXT_SCORING,
    }
    assert tasks["SpeechService"] == {Task.TRANSCRIPTION, Task.SPEECH_SYNTHESIS}
    assert Task.CAPTIONING in tasks["ImageService"]
    assert not tasks["ModelService"]
    assert not tasks["GRPCInferenceService"]


def test_openai_asks_for_abilities_that_an_rpc_asks_for_too():
    known = {id(ability) for rpc in RPCS.values() for ability in rpc.abilities}
    assert all(isinstance(ability, Ability) and id(ability) in known for ability in OPENAI_ABILITIES.values())
