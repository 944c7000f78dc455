"""What the first runs of a graph tell about it."""

import pytest

from headway_server.batching.warm_up import WarmUp


@pytest.mark.parametrize(("one_core_s", "expected"), [(10e-3, 6), (0.32e-3, 200), (1.0, 0), (None, None)])
def test_padding_is_worth_as_many_tokens_as_run_in_two_milliseconds(one_core_s, expected):
    assert WarmUp(outputs={}, one_core_s=one_core_s).most_padding(32) == expected
