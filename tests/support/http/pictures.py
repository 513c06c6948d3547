"""Pictures for requests, as files and in the forms of the APIs."""

from __future__ import annotations

import base64
import io
import struct
import zlib
from typing import Any

import numpy as np
from PIL import Image


def noise(seed: int, size: tuple[int, int] = (60, 40)) -> Image.Image:
    """A random RGB picture of (width, height)."""
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8))


def saved(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def base64_of(data: bytes) -> str:
    return base64.b64encode(data).decode()


def data_url(data: bytes) -> str:
    return f"data:image/png;base64,{base64_of(data)}"


def chunk(name: bytes, data: bytes) -> bytes:
    """A chunk of a PNG file."""
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def png(width: int, height: int, *more: bytes, rows: bytes = b"") -> bytes:
    """A PNG file of 8-bit grey values with this size in its header, more chunks, and compressed rows."""
    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + b"".join(more) + chunk(b"IDAT", zlib.compress(rows, 9)) + chunk(b"IEND", b"")


def _zipped() -> bytes:
    """200 MB of zeros in 194 kB."""
    made = zlib.compressobj(9)
    return b"".join(made.compress(bytes(1_000_000)) for _ in range(200)) + made.flush()


ZIPPED = _zipped()

HOSTILE: dict[str, bytes] = {
    "header of 20,000 x 20,000": png(20_000, 20_000),
    "rows of 8000 x 8001": png(8000, 8001, rows=bytes(8001 * 8001)),
    "a side of 70,000": png(70_000, 1, rows=bytes(70_001)),
    "zTXt bomb": png(4, 4, chunk(b"zTXt", b"x\0\0" + ZIPPED), rows=bytes(20)),
    "iTXt bomb": png(4, 4, chunk(b"iTXt", b"x\0\1\0\0\0" + ZIPPED), rows=bytes(20)),
    "iCCP bomb": png(60, 40, chunk(b"iCCP", b"x\0\0" + ZIPPED), rows=bytes(61 * 40)),
    "truncated PNG": saved(noise(1))[:-800],
    "truncated JPEG": saved(noise(1), "JPEG")[:400],
    "empty": b"",
    "text": b"not a picture",
    "SVG": b'<svg xmlns="http://www.w3.org/2000/svg"><image href="file:///etc/passwd"/></svg>',
    "SVG with a prolog": b'<?xml version="1.0"?>\n<svg xmlns="http://www.w3.org/2000/svg"/>',
    "HEIC": b"\0\0\0\x18ftypheic\0\0\0\0heicmif1",
    "TIFF": saved(noise(1), "TIFF"),
    "ICO": saved(noise(1, (32, 32)), "ICO"),
    "EPS": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n",
    "PDF": b"%PDF-1.7\n",
    "more than 20 MB": saved(noise(1)) + bytes(20_000_000),
}
"""Files that are refused, by what they are."""


def _sixteen_bit() -> Image.Image:
    return Image.fromarray(np.arange(40 * 60, dtype=np.uint16).reshape(40, 60) * 27)


def _palette() -> Image.Image:
    image = noise(3).quantize(16)
    image.info["transparency"] = 3
    return image


def _turned(orientation: int) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return saved(noise(2), "JPEG", exif=exif)


ODD: dict[str, bytes] = {
    "CMYK JPEG": saved(noise(1).convert("CMYK"), "JPEG"),
    "16-bit PNG": saved(_sixteen_bit()),
    "palette with tRNS": saved(_palette(), transparency=3),
    "RGBA": saved(noise(1).convert("RGBA")),
    "grey with alpha": saved(noise(1).convert("LA")),
    "1-bit": saved(noise(1).convert("1")),
    "1 x 1": saved(noise(1, (1, 1))),
    "WebP": saved(noise(1), "WEBP"),
    "GIF": saved(noise(1), "GIF"),
    "animated GIF": saved(noise(1), "GIF", save_all=True, append_images=[noise(2)]),
    "BMP": saved(noise(1), "BMP"),
    **{f"EXIF orientation {number}": _turned(number) for number in range(1, 9)},
}
"""Unusual files that are accepted, by what they are."""
