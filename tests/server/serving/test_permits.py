"""Permits."""

import pytest

from headway_server.errors import OverloadedError
from headway_server.serving.permits import Admission


@pytest.fixture
def admission() -> Admission:
    return Admission(limit=10, noun="texts", owner="topics")


async def test_a_full_model_refuses_and_says_when_to_come_back(admission):
    with admission.admit(8):
        with pytest.raises(
            OverloadedError, match="topics has 8 texts waiting, the limit is 10 and this call brings 3"
        ) as e:
            admission.admit(3).__enter__()
        assert 0 < e.value.retry_after_s <= 30
        with admission.admit(2):
            pass
    with admission.admit(10):
        pass


async def test_bytes_are_bounded_beside_the_count():
    admission = Admission(limit=10, noun="images", owner="colours", max_bytes=100)
    message = "colours has 60 bytes of images waiting, the limit is 100 and this call brings 41"
    with admission.admit(1, 60):
        with pytest.raises(OverloadedError, match=message) as e:
            admission.admit(1, 41).__enter__()
        assert 0 < e.value.retry_after_s <= 30
        with admission.admit(1, 40):
            pass
    with admission.admit(1, 100):
        pass


async def test_a_call_of_more_bytes_than_the_limit_is_admitted_alone():
    admission = Admission(limit=10, noun="images", owner="colours", max_bytes=100)
    with admission.admit(1, 101), pytest.raises(OverloadedError):
        admission.admit(1, 1).__enter__()
    with admission.admit(1, 1), pytest.raises(OverloadedError):
        admission.admit(1, 101).__enter__()


async def test_a_permit_is_given_back_after_an_error(admission):
    with pytest.raises(ZeroDivisionError), admission.admit(10):
        raise ZeroDivisionError
    with admission.admit(10):
        pass
