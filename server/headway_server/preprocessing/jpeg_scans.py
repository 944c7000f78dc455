"""Counts the scans of a JPEG file, each of which is a pass of the decoder over all pixels.

A scan that says nothing new takes some 40 bytes, and 20 ms of a picture of 20 megapixels: a file of 16 MiB could keep a
decoder busy for hours (Cameron, "Two Issues with the JPEG Standard", libjpeg-turbo, 2015). Encoders write about ten.
"""

from __future__ import annotations

import re
from typing import Final

from headway_server.errors import InvalidInputError

MAX_SCANS: Final = 100
"""Most scans of a JPEG; a progressive one has about ten, those that were searched for the smallest file some dozens."""

_MARKER = re.compile(rb"\xff([\x01-\xcf\xd8-\xfe])")
"""Behind coded data: 00 says that the byte before is data, D0 to D7 are restarts within a scan, FF fills."""
_START_OF_SCAN = 0xDA
_END_OF_IMAGE = 0xD9
_WITHOUT_LENGTH = (0x01, 0xD8)


def check_scans(data: bytes, field: str) -> None:
    """Checks the scans of a JPEG.

    Raises:
        InvalidInputError: There are more than `MAX_SCANS`.
    """
    if data.count(b"\xff\xda") > MAX_SCANS and _has_more_scans(
        data, MAX_SCANS
    ):  # the first tells at once of nearly all
        raise InvalidInputError(
            field,
            f"has more than {MAX_SCANS} scans, each of which is a pass over all its pixels; save it anew as a JPEG or "
            "PNG and send that",
        )


def _has_more_scans(data: bytes, limit: int) -> bool:
    """Walks from marker to marker, since those two bytes may stand in a colour profile or a preview, too."""
    position, num_scans = 2, 0
    while (found := _MARKER.search(data, position)) is not None and found[1][0] != _END_OF_IMAGE:
        position = found.end()
        if found[1][0] in _WITHOUT_LENGTH:
            continue
        num_scans += found[1][0] == _START_OF_SCAN
        if num_scans > limit:
            return True
        position += max(int.from_bytes(data[position : position + 2]), 2)
    return False
