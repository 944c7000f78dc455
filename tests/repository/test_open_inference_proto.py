"""The Open Inference Protocol is declared as its clients know it."""

from __future__ import annotations

from triton_client import describe_files, triton_process

from headway.oip import grpc_predict_v2_pb2


def test_every_message_enum_and_method_is_that_of_the_real_client() -> None:
    ours = describe_files(grpc_predict_v2_pb2.DESCRIPTOR)
    with triton_process() as triton:
        theirs = triton(0, "fields_of_protocol")
    assert ours.keys() <= theirs.keys()
    for name, members in ours.items():
        assert {member: theirs[name].get(member) for member in members} == members, name
