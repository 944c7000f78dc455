"""Tells what kind of file something is by how it begins, so that a refusal can say what to do instead."""

from __future__ import annotations

import re
from collections.abc import Mapping

READ = ("JPEG", "PNG", "WEBP", "BMP", "GIF")
"""Formats that are read, by Pillow's names."""
READ_AS_TEXT = "JPEG, PNG, WebP, BMP or GIF"

_BEGINNINGS: Mapping[str, tuple[bytes, ...]] = {
    "JPEG": (b"\xff\xd8\xff",),
    "PNG": (b"\x89PNG\r\n\x1a\n",),
    "BMP": (b"BM",),
    "GIF": (b"GIF87a", b"GIF89a"),
    "TIFF": (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+"),
    "JPEG XL": (b"\xff\x0a", b"\0\0\0\x0cJXL \r\n\x87\n"),
    "JPEG 2000": (b"\0\0\0\x0cjP  \r\n\x87\n", b"\xff\x4f\xff\x51"),
    "PDF": (b"%PDF-",),
    "Photoshop": (b"8BPS",),
    "icon": (b"\0\0\1\0",),
    "zip": (b"PK\3\4",),
    "gzip": (b"\x1f\x8b",),
}
_ISO_BRANDS = {
    "HEIC": (b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"hevm", b"hevs", b"mif1", b"msf1"),
    "AVIF": (b"avif", b"avis"),
}
"""Of ISO base media files: bytes 8 to 12, behind `ftyp`."""
_SEARCHED_BYTES = 4096
"""Of a text, in which its first element is looked for."""
_SVG = re.compile(rb"<svg[\s>]", re.IGNORECASE)
_WEB_PAGE = re.compile(rb"\A\s*<(!doctype html|html)[\s>]", re.IGNORECASE)
_BASE64 = re.compile(rb"\A\s*(data:image/|/9j/|iVBORw0KGgo|R0lGOD|UklGR|Qk[0-9A-Za-z+/]{20})")
"""Base64 of the formats that are read, or a data URL."""
_CONVERT = "convert it to JPEG or PNG and send that"
_ADVICE = {
    "SVG": "render it to a PNG of the size it is meant to be seen at, and send that",
    "PDF": "render the page to a PNG and send that",
    "zip": "send the images in it one by one",
    "gzip": "unpack it and send what is in it",
    "web page": "send the bytes of the image itself; a link to it may need a login",
    "base64": "decode it and send the bytes it stands for: the field takes bytes",
}
_DESCRIPTIONS = {
    "SVG": "an SVG drawing, which has no pixels yet",
    "HEIC": "a HEIC image",
    "AVIF": "an AVIF image",
    "base64": "an image written as base64 text",
    "icon": "an icon file",
    "web page": "a web page",
}
"""Of the formats that `a ... file` does not describe."""


def recognise(data: bytes) -> str | None:
    """Returns the name of the format that `data` begins like; None where it is none of those known here."""
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "WEBP"
    if data[4:8] == b"ftyp":
        return next((name for name, brands in _ISO_BRANDS.items() if data[8:12] in brands), None)
    for name, beginnings in _BEGINNINGS.items():
        if data.startswith(beginnings):
            return name
    return _recognise_text(data[:_SEARCHED_BYTES])


def _recognise_text(beginning: bytes) -> str | None:
    """A web page may hold drawings, so it is looked for first."""
    for name, pattern in (("web page", _WEB_PAGE), ("base64", _BASE64)):
        if pattern.match(beginning):
            return name
    return "SVG" if _SVG.search(beginning) else None


def refusal(data: bytes) -> str:
    """Says, for the end of a message, why bytes that no decoder took are not read, and what to do."""
    name = recognise(data)
    if name is None:
        return f"is not an image this server can read; send a {READ_AS_TEXT} file"
    if name in READ:
        return f"begins like a {name} image but its header is damaged or truncated; send the whole file"
    described = _DESCRIPTIONS.get(name, f"a {name} file")
    return f"is {described}, and this server reads {READ_AS_TEXT}; {_ADVICE.get(name, _CONVERT)}"
