"""The table of abilities: every RPC of the protocols and every task has its place in it."""

from pkgutil import resolve_name

import pytest

from headway_server.bundles import Task
from headway_server.services import service_abilities, service_descriptors
from headway_server.services.open_inference.tasks import TensorTask
from headway_server.tasks.table import FAMILIES, READ_IMAGES, RPCS, SYNTHESIZE_SPEECH, TRANSCRIBE_SPEECH
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
    asked = {ability for rpc in RPCS.values() for ability in rpc.abilities}
    assert FAMILIES.keys() == set(Task)
    for task, family in FAMILIES.items():
        assert asked.intersection(family.made_for) or task is Task.TENSORS, task  # which ModelInfer asks by name
        assert isinstance(resolve_name(family.tensors), TensorTask), task


def test_no_two_abilities_have_one_name():
    abilities = {ability for family in FAMILIES.values() for ability in family.abilities}
    assert len({ability.name for ability in abilities}) == len(abilities)
    assert abilities.issuperset(ability for rpc in RPCS.values() for ability in rpc.abilities)


def test_a_service_is_healthy_by_the_models_that_its_calls_ask_for():
    abilities = {service.name: service_abilities(service) for service in service_descriptors()}
    assert {one.name for one in abilities["TextClassificationService"]} == {
        "classify_text",
        "classify_tokens",
        "classify_pages",
    }
    assert {one.name for one in abilities["EmbeddingService"]} == {
        "embed_text",
        "embed_text_sparsely",
        "embed_text_multi_vector",
        "embed_image",
    }
    assert abilities["SpeechService"] == {TRANSCRIBE_SPEECH, SYNTHESIZE_SPEECH}
    assert READ_IMAGES in abilities["ImageService"]
    assert not abilities["ModelService"]
    assert not abilities["GRPCInferenceService"]


def test_openai_asks_for_abilities_that_some_models_have():
    known = {ability for family in FAMILIES.values() for ability in family.abilities}
    assert known.issuperset(OPENAI_ABILITIES.values())
