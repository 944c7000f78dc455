"""Tensors as they travel: typed, as most clients send them, and raw; damaged ones are refused."""

import contextlib

import grpc
import numpy as np
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status
from hypothesis import given
from hypothesis import strategies as st
from open_inference import infer_request

from headway.oip import grpc_predict_v2_pb2 as pb
from headway.oip import grpc_predict_v2_pb2_grpc as pb_grpc
from headway_server.errors import InvalidInputError
from headway_server.services.open_inference.tasks import _mask_pixels
from headway_server.services.open_inference.tensors import BYTES, TensorSpec, add_output, read_inputs
from headway_server.tasks.segmentation.model import SegmentMask

IDS = TensorSpec(name="x", datatype="INT64", shape=(-1, -1))
PIXELS = TensorSpec(name="x", datatype="FP32", shape=(-1, 2))
TEXTS = TensorSpec(name="x", datatype=BYTES, shape=(-1,))


def typed(datatype: str, shape: list[int], field: str, values: list) -> pb.ModelInferRequest:
    request = pb.ModelInferRequest()
    tensor = request.inputs.add(name="x", datatype=datatype, shape=shape)
    getattr(tensor.contents, field).extend(values)
    return request


def raw(datatype: str, shape: list[int], data: bytes) -> pb.ModelInferRequest:
    request = pb.ModelInferRequest(raw_input_contents=[data])
    request.inputs.add(name="x", datatype=datatype, shape=shape)
    return request


@pytest.mark.parametrize(
    ("datatype", "field", "spec"),
    [
        *((f"INT{bits}", "int_contents", IDS) for bits in (8, 16, 32)),
        ("INT64", "int64_contents", IDS),
        *((f"UINT{bits}", "uint_contents", IDS) for bits in (8, 16, 32)),
        ("UINT64", "uint64_contents", IDS),
        ("FP32", "fp32_contents", PIXELS),
        ("FP64", "fp64_contents", PIXELS),
    ],
)
def test_typed_elements_of_every_type_are_read(datatype, field, spec):
    arrays = read_inputs(typed(datatype, [2, 2], field, [1, 2, 3, 100]), [spec], max_rows=2)
    assert arrays["x"].tolist() == [[1, 2], [3, 100]]


def test_raw_halves_of_both_kinds_are_read():
    values = np.array([1.5, -2, 0, 100], np.float32)
    bfloat = (values.view(np.uint32) >> 16).astype("<u2").tobytes()
    for datatype, data in (("FP16", values.astype("<f2").tobytes()), ("BF16", bfloat)):
        arrays = read_inputs(raw(datatype, [2, 2], data), [PIXELS], max_rows=2)
        assert arrays["x"].tolist() == [[1.5, -2], [0, 100]]
        assert arrays["x"].dtype == np.float32


@pytest.mark.parametrize(
    ("request_", "spec", "says"),
    [
        (typed("INT8", [1, 1], "int_contents", [128]), IDS, "contents.int_contents: has a value that is out of"),
        (typed("INT64", [1, 2], "int64_contents", [1]), IDS, "shape: is [1, 2], 2 elements, and contents.int64_con"),
        (typed("INT64", [1, 1], "int_contents", [1]), IDS, "contents.int_contents: is set, and elements of INT64"),
        (typed("FP16", [1, 2], "fp32_contents", [1, 1]), PIXELS, "contents: has no field for FP16"),
        (typed("INT64", [1, -1], "int64_contents", []), IDS, "shape: is [1, -1]"),
        (typed("INT64", [1, 2**62], "int64_contents", [1]), IDS, "shape: is [1, 4611686018427387904], 46116860184"),
        (typed("INT64", [1, 1, 1, 1], "int64_contents", [1]), IDS, "shape: is [1, 1, 1, 1]; x must be [-1, -1]"),
        (raw("INT64", [1, 1], b"1234567"), IDS, "shape: is [1, 1], 8 bytes of INT64, and raw_input_contents has 7"),
        (raw(BYTES, [2], b"\1\0\0\0a"), TEXTS, "shape: is of 2 elements, and raw_input_contents ends within element 1"),
        (raw(BYTES, [1], b"\xff\xff\xff\xffa"), TEXTS, "shape: is of 1 elements, and raw_input_contents ends within"),
        (raw(BYTES, [1], b"\1\0\0"), TEXTS, "shape: is of 1 elements, and raw_input_contents ends within element 0"),
        (raw(BYTES, [1], b"\1\0\0\0ab"), TEXTS, "shape: is of 1 elements, and raw_input_contents has 1 bytes behind"),
        (raw("STRING", [1], b""), TEXTS, "datatype: is 'STRING'; x must be BYTES"),
    ],
)
def test_elements_that_do_not_fit_are_refused(request_, spec, says):
    with pytest.raises(InvalidInputError) as caught:
        read_inputs(request_, [spec], max_rows=2)
    assert str(caught.value).startswith(f"inputs[0].{says}")


def test_inputs_are_given_once_and_one_way():
    request = raw("INT64", [1, 1], b"12345678")
    request.inputs[0].contents.int64_contents.append(1)
    with pytest.raises(InvalidInputError, match="together with raw_input_contents"):
        read_inputs(request, [IDS], max_rows=1)
    request = raw("INT64", [1, 1], b"12345678")
    request.raw_input_contents.append(b"")
    with pytest.raises(InvalidInputError, match="has 2 elements for 1 inputs"):
        read_inputs(request, [IDS], max_rows=1)
    request = typed("INT64", [1, 1], "int64_contents", [1])
    request.inputs.append(request.inputs[0])
    with pytest.raises(InvalidInputError, match="give each once"):
        read_inputs(request, [IDS], max_rows=1)
    request = raw("INT64", [1, 1], b"12345678")
    request.inputs[0].parameters["shared_memory_region"].string_param = "region"
    with pytest.raises(InvalidInputError, match="shared memory"):
        read_inputs(request, [IDS], max_rows=1)


def test_what_http_says_of_binary_data_has_no_effect_over_grpc():
    """KServe's client sends it."""
    request = raw("INT64", [1, 1], b"12345678")
    request.inputs[0].parameters["binary_data_size"].int64_param = 8
    assert read_inputs(request, [IDS], max_rows=1).keys() == {IDS.name}


@given(st.lists(st.binary(max_size=20), min_size=1, max_size=8))
def test_bytes_come_back_as_they_were_sent(elements):
    response = pb.ModelInferResponse()
    array = np.empty(len(elements), object)
    array[:] = elements
    add_output(response, "x", array, is_raw=True)
    arrays = read_inputs(raw(BYTES, [len(elements)], response.raw_output_contents[0]), [TEXTS], max_rows=8)
    assert arrays["x"].tolist() == elements


@given(st.binary(max_size=64), st.lists(st.integers(-3, 2**40), max_size=3))
def test_no_raw_bytes_break_the_reader(data, shape):
    for datatype, spec in ((BYTES, TEXTS), ("INT64", IDS), ("BF16", PIXELS)):
        with contextlib.suppress(InvalidInputError):
            read_inputs(raw(datatype, shape, data), [spec], max_rows=256)


async def test_a_typed_call_is_answered_typed_and_its_error_has_the_details(served):
    async with grpc.aio.insecure_channel(f"127.0.0.1:{served.port}") as channel:
        stub = pb_grpc.GRPCInferenceServiceStub(channel)
        answer = await stub.ModelInfer(infer_request("topics", "goal", "atom", request_id="7"))
        assert not answer.raw_output_contents
        outputs = {output.name: output for output in answer.outputs}
        assert answer.id == "7"
        assert outputs["label"].contents.bytes_contents[0] == b"sports"
        assert len(outputs["probability"].contents.fp32_contents) == 6
        assert list(outputs["token_count"].contents.int64_contents) == [2, 2]
        assert list(outputs["selected"].contents.bool_contents) == [True, False, False] * 2
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.ModelInfer(infer_request("topics", "goal", ""))
        details = rpc_status.from_call(caught.value).details
        violation = error_details_pb2.BadRequest()
        assert any(detail.Unpack(violation) for detail in details)
        assert violation.field_violations[0].field == "text[1]"


async def test_requests_of_texts_are_held_to_the_size_of_texts(served):
    async with grpc.aio.insecure_channel(f"127.0.0.1:{served.port}") as channel:
        stub = pb_grpc.GRPCInferenceServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError, match="limit of models of texts is 8388608"):
            await stub.ModelInfer(infer_request("topics", "a" * 9_000_000))
        with pytest.raises(grpc.aio.AioRpcError, match="model_name: is empty"):
            await stub.ModelInfer(pb.ModelInferRequest())


async def test_pixels_of_masks_are_bounded():
    nothing = {"predicted_iou": 1.0, "stability": 1.0, "box": (0, 0, 0, 0), "area": 0, "counts": None, "png": b""}
    masks = [SegmentMask(**nothing, width=5_000, height=2_000)] * 2
    with pytest.raises(InvalidInputError, match=r"outputs: have mask_pixels, of shape \[2, 2000, 5000\]; the limit is"):
        await _mask_pixels(masks)
    assert (await _mask_pixels([])).shape == (0, 0, 0)
