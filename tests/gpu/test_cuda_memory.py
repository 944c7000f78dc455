"""State in the memory of a GPU."""

import numpy as np
import pytest

from headway_server.runtime.memory import CudaBuffer, HostBuffer

SHAPE = (4, 3, 10, 8)  # slots, heads, cache_length, head_dim


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_slots_move_on_the_device_as_they_do_in_main_memory(cuda, dtype):
    values = np.random.default_rng(3).standard_normal(SHAPE).astype(dtype)
    on_device, on_host = CudaBuffer(SHAPE, dtype), HostBuffer(SHAPE, dtype)
    assert not on_device._value.numpy().any()
    on_device._value.update_inplace(values)
    on_host._array[:] = values
    for source, target, length in [(3, 0, 10), (1, 3, 4), (0, 2, 1), (2, 1, 7)]:
        on_device.copy(on_device, (source, 0), (target, 0), length)
        on_host.copy(on_host, (source, 0), (target, 0), length)
    np.testing.assert_array_equal(on_device._value.numpy(), on_host._array)
    assert on_device.address(2) - on_device.address(0) == on_host.address(2) - on_host.address(0)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_whole_slots_are_copied_and_filled_on_the_device_as_in_main_memory(cuda, dtype):
    shape = (4, 12)  # slots, width of a recurrent state
    values = np.random.default_rng(4).standard_normal(shape).astype(dtype)
    pairs = [(CudaBuffer(shape, dtype), CudaBuffer(shape, dtype)), (HostBuffer(shape, dtype), HostBuffer(shape, dtype))]
    for buffer, other in pairs:
        for slot in range(4):
            other.fill(slot, values[slot])
        buffer.fill(3, values[0])
        buffer.copy_slots(other, 0, 1, 2)
        buffer.copy_slots(buffer, 2, 0, 1)
        other.fill(2, None)
    (on_device, other_on_device), (on_host, other_on_host) = pairs
    np.testing.assert_array_equal(on_host._array, values[[1, 0, 1, 0]])
    np.testing.assert_array_equal(on_device._value.numpy(), on_host._array)
    np.testing.assert_array_equal(other_on_device._value.numpy(), other_on_host._array)
