"""Decodes pictures under limits: bytes, paths, PIL images and arrays become immutable RGB pixels with a digest.

A picture is hostile input. Its size is checked in the header, before anything is decoded. Only five formats reach Pillow, and a damaged
or truncated file is refused. Conversions equal those of transformers 5.24 (`image_transforms.convert_to_rgb`, `exif_transpose`), except
16-bit grey values: Pillow clips them to white, and here they are scaled.

Pillow is imported when the first picture is read.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import os
import re
import struct
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, Union
from urllib.parse import unquote_to_bytes

import numpy as np

from ..errors import ImageError, one_line
from ..util.dataclass import dataclass
from ..util.plain_file import read_plain

if TYPE_CHECKING:
    from PIL.Image import Image

    PictureSource: TypeAlias = Union[bytes, bytearray, memoryview, str, Path, Image, np.ndarray[Any, np.dtype[Any]]]

MAX_BYTES = 20_000_000
"""Maximum bytes of an encoded picture."""
MAX_PIXELS = 64_000_000
"""Maximum pixels of a picture."""
MAX_SIDE = 65_535
"""Maximum width and height, as in JPEG. Resizing takes about 50 bytes for each pixel of a side."""
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
"""Formats that are decoded, by Pillow's names."""

_SUPPORTED = "PNG, JPEG, WebP, GIF or BMP"
_DIGEST_BYTES = 32
_ORIENTATION = 0x0112
_FOREIGN = (
    (re.compile(rb"\s*(?:\xef\xbb\xbf)?\s*(?:<\?xml.{0,1000}?)?<svg", re.DOTALL | re.IGNORECASE), "SVG"),
    (re.compile(rb".{4}ftyp(?:heic|heix|hevc|hevx|heim|heis|mif1|msf1)", re.DOTALL), "HEIC"),
    (re.compile(rb".{4}ftypavi[fs]", re.DOTALL), "AVIF"),
    (re.compile(rb".{4}ftyp", re.DOTALL), "MP4"),
    (re.compile(rb"II\*\0|MM\0\*|II\+\0|MM\0\+"), "TIFF"),
    (re.compile(rb"%PDF-"), "PDF"),
    (re.compile(rb"\xff\x0a|\0\0\0\x0cJXL "), "JPEG XL"),
    (re.compile(rb"\0\0\0\x0cjP  |\xff\x4f\xff\x51"), "JPEG 2000"),
    (re.compile(rb"8BPS"), "PSD"),
    (re.compile(rb"%!PS"), "PostScript"),
    (re.compile(rb"\s*<(?:!doctype|html)", re.IGNORECASE), "HTML"),
)
_ESCAPED = {"%2B": "+", "%2b": "+", "%2F": "/", "%2f": "/", "%3D": "=", "%3d": "=", "%20": "", "%0A": "", "%0a": "", "%0D": "", "%0d": ""}
"""Signs of base64 that a URL may escape."""
_SPACES = dict.fromkeys(" \t\r\n", "")


@dataclass(frozen=True, slots=True, eq=False)
class Picture:
    """Pixels of one picture, upright and without transparency."""

    pixels: np.ndarray[Any, np.dtype[np.uint8]]
    """uint8 [height, width, 3], RGB, read-only."""
    digest: bytes
    """BLAKE2b (256 bits) of the size and the pixels: equal for equal pixels, whatever the file."""
    format: str
    """Pillow's name of the file format, or "array" or "image"."""
    first_frame_only: bool = False
    """True if the file is an animation; only its first frame is used."""

    @property
    def size(self) -> tuple[int, int]:
        """(height, width)."""
        return self.pixels.shape[0], self.pixels.shape[1]


def read_picture(source: PictureSource) -> Picture:
    """Return the picture in bytes, in a file (`str` or `Path`), in a `data:` URL, or of a PIL image or a uint8 array.

    Arrays are [height, width] or [height, width, 1, 3 or 4]. Raises `ImageError`.
    """
    if isinstance(source, np.ndarray):
        return _from_array(source)
    if isinstance(source, (bytes, bytearray, memoryview)):
        return _from_bytes(bytes(source))
    if isinstance(source, str) and (source[:5].lower() == "data:" or "://" in source[:16]):
        return picture_from_url(source)
    if isinstance(source, (str, Path)):
        return _from_bytes(read_file(Path(source)))
    from PIL import Image

    if not isinstance(source, Image.Image):
        raise ImageError(f"an image must be bytes, a path, a PIL image or a uint8 array, not {type(source).__name__}")
    with _decoding_errors():
        _check_size(source.width, source.height)
        source.load()
        return _picture(_rgb(_upright(source, _orientation(source))), "image")


def picture_from_url(url: str) -> Picture:
    """Return the picture in a `data:` URL. Any other URL is refused: nothing is fetched. Raises `ImageError`."""
    return _from_bytes(bytes_of_url(url))


def bytes_of_url(url: str) -> bytes:
    """Return the bytes in a `data:` URL. Raises `ImageError`, also for any other URL."""
    scheme, _, rest = url.partition(":")
    if scheme.lower() != "data":
        kind = f"{scheme.lower()[:16]}: URLs are" if "://" in url[:24] else "a URL other than data: is"
        raise ImageError(f"{kind} not fetched: send the picture itself as a data: URL (data:image/png;base64,...)")
    if len(rest) > 2 * MAX_BYTES:
        raise _too_many_bytes()
    header, comma, body = rest.partition(",")
    if not comma:
        raise ImageError("the data: URL has no comma before its data: write data:image/png;base64,...")
    if not header.lower().rstrip().endswith(";base64"):
        return unquote_to_bytes(body)
    return bytes_of_base64(_replaced(body, _ESCAPED) if "%" in body else body)


def bytes_of_base64(text: str) -> bytes:
    """Return the bytes that `text` encodes, without white space. The length is checked before anything is decoded. Raises `ImageError`."""
    if len(text) > 2 * MAX_BYTES:
        raise _too_many_bytes()
    try:
        data = _replaced(text, _SPACES)
        if len(data) * 3 // 4 > MAX_BYTES + 2:
            raise _too_many_bytes()
        return base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ImageError(f"the image is not valid base64 ({one_line(error, 80)}): it may be truncated") from None


def _replaced(text: str, signs: Mapping[str, str]) -> str:
    """Return the text with these signs replaced. Memory does not grow with the number of signs, as it would with `re.sub`."""
    for sign, other in signs.items():
        text = text.replace(sign, other)
    return text


def picture_size(data: bytes) -> tuple[int, int]:
    """Return (height, width) of the upright picture from the file's header, without decoding. Raises `ImageError`."""
    with _decoding_errors(), _opened(data) as image:
        width, height = image.size
        return (width, height) if _orientation(image, data) >= 5 else (height, width)


def _from_bytes(data: bytes) -> Picture:
    with _decoding_errors(), _opened(data) as image:
        orientation = _orientation(image, data)
        image.load()
        _check_size(*image.size)
        upright = _rgb(_upright(image, orientation)).copy()
        kind = "JPEG" if image.format == "MPO" else str(image.format)
        # Asking seeks in the file, so it comes after the pixels.
        return _picture(upright, kind, kind != "JPEG" and bool(getattr(image, "is_animated", False)))


def _from_array(array: np.ndarray[Any, np.dtype[Any]]) -> Picture:
    if array.dtype != np.uint8:
        raise ImageError(f"an image array must be uint8 with values of 0 to 255, not {array.dtype}: scale and convert it")
    if array.ndim == 2:
        array = array[..., None]
    if array.ndim != 3 or array.shape[-1] not in (1, 3, 4) or 0 in array.shape:
        raise ImageError(f"an image array must be [height, width, channels] with 1, 3 or 4 channels, not {list(array.shape)}")
    _check_size(array.shape[1], array.shape[0])
    from PIL import Image

    mode = {1: "L", 3: "RGB", 4: "RGBA"}[array.shape[-1]]
    plane = np.ascontiguousarray(array[..., 0] if mode == "L" else array)
    return _picture(_rgb(Image.fromarray(plane, mode)), "array")


def _picture(image: Image, kind: str, first_frame_only: bool = False) -> Picture:
    pixels = np.array(image, dtype=np.uint8)
    pixels.flags.writeable = False
    digest = hashlib.blake2b(struct.pack("<QQ", *pixels.shape[:2]), digest_size=_DIGEST_BYTES)
    digest.update(pixels.data)
    return Picture(pixels, digest.digest(), kind, first_frame_only)


def read_file(path: Path) -> bytes:
    try:
        if os.stat(path).st_size > MAX_BYTES:
            raise _too_many_bytes()
        return read_plain(path, MAX_BYTES)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ImageError(f"the image {one_line(path, 120)} cannot be read: {one_line(reason)}") from None


def _too_many_bytes() -> ImageError:
    return ImageError(f"the image has more than {MAX_BYTES // 1_000_000} MB: scale it down or compress it")


def _check_size(width: int, height: int) -> None:
    if width < 1 or height < 1:
        raise ImageError(f"the image is empty: {width} x {height} pixels")
    if width * height > MAX_PIXELS:
        raise ImageError(f"the image has {width} x {height} pixels, more than {MAX_PIXELS // 1_000_000} million: scale it down")
    if max(width, height) > MAX_SIDE:
        raise ImageError(f"the image has {width} x {height} pixels, and a side has at most {MAX_SIDE}: cut it into parts")


@contextmanager
def _decoding_errors() -> Iterator[None]:
    """Turn what Pillow raises for damaged or hostile files into `ImageError`."""
    from PIL import Image

    faults: tuple[type[BaseException], ...] = (OSError, SyntaxError, EOFError, LookupError, ArithmeticError, struct.error, zlib.error)
    faults += (ValueError, TypeError, AttributeError, RuntimeError, MemoryError)
    try:
        yield
    except ImageError:
        raise
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise ImageError(f"the image has more than {MAX_PIXELS // 1_000_000} million pixels: scale it down") from None
    except faults as error:
        reason = "it is truncated" if "truncated" in str(error) else one_line(error, 120)
        raise ImageError(f"the image cannot be decoded: {reason}; save it again as PNG or JPEG") from None


@contextmanager
def _opened(data: bytes) -> Iterator[Image]:
    """Open a picture lazily: only its header is read. Raises `ImageError` for other formats and too many bytes or pixels."""
    from PIL import Image, UnidentifiedImageError

    if not data:
        raise ImageError("the image is empty")
    if len(data) > MAX_BYTES:
        raise _too_many_bytes()
    foreign = next((name for pattern, name in _FOREIGN if pattern.match(data[:2048])), None)
    if foreign is not None:
        hint = " (on a Mac: sips -s format jpeg picture.heic --out picture.jpg)" if foreign == "HEIC" else ""
        raise ImageError(f"{foreign} is not supported: convert the image to {_SUPPORTED}{hint}")
    size = _declared_size(data)
    if size is not None:
        _check_size(*size)
    try:
        image = Image.open(BytesIO(data), formats=FORMATS)
    except UnidentifiedImageError:
        raise ImageError(f"this is not an image of a supported format: send {_SUPPORTED}") from None
    with image:
        _check_size(*image.size)
        yield image


def _declared_size(data: bytes) -> tuple[int, int] | None:
    """Return (width, height) in the header of a PNG or WebP file, of which Pillow decodes or allocates parts when opening it."""
    if data[:8] == b"\x89PNG\r\n\x1a\n" and data[12:16] == b"IHDR" and len(data) >= 24:
        width, height = struct.unpack(">II", data[16:24])
        return width, height
    if data[:4] != b"RIFF" or data[8:12] != b"WEBP" or len(data) < 30:
        return None
    if data[12:16] == b"VP8X":
        return int.from_bytes(data[24:27], "little") + 1, int.from_bytes(data[27:30], "little") + 1
    if data[12:16] == b"VP8L":
        bits = int.from_bytes(data[21:25], "little")
        return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    return int.from_bytes(data[26:28], "little") & 0x3FFF, int.from_bytes(data[28:30], "little") & 0x3FFF


def _orientation(image: Image, data: bytes = b"") -> int:
    """Return the EXIF orientation, 1 to 8. A PNG's `eXIf` chunk may follow the pixels; it is found without decoding them."""
    from PIL import Image

    if image.format == "PNG" and "exif" not in image.info and (exif := _png_exif(data)):
        found = Image.Exif()
        found.load(b"Exif\x00\x00" + exif)
    else:
        found = Image.Image.getexif(image)  # PngImageFile.getexif would decode
    value = found.get(_ORIENTATION, 1)
    return value if isinstance(value, int) and 1 <= value <= 8 else 1


def _png_exif(data: bytes) -> bytes:
    place = 8
    while place + 8 <= len(data):
        length = int.from_bytes(data[place : place + 4], "big")
        if data[place + 4 : place + 8] == b"eXIf":
            return data[place + 8 : place + 8 + length]
        place += 12 + length
    return b""


def _upright(image: Image, orientation: int) -> Image:
    from PIL.Image import Transpose

    methods = {
        2: Transpose.FLIP_LEFT_RIGHT,
        3: Transpose.ROTATE_180,
        4: Transpose.FLIP_TOP_BOTTOM,
        5: Transpose.TRANSPOSE,
        6: Transpose.ROTATE_270,
        7: Transpose.TRANSVERSE,
        8: Transpose.ROTATE_90,
    }
    return image.transpose(methods[orientation]) if orientation in methods else image


def _rgb(image: Image) -> Image:
    """Return the image in mode RGB: transparency over white, 16-bit and float values scaled."""
    from PIL import Image

    if image.mode.startswith("I") or image.mode == "F":
        return Image.fromarray(_eight_bits(np.asarray(image), image.mode)).convert("RGB")
    if "A" in image.getbands() or "a" in image.getbands() or image.info.get("transparency") is not None:
        image = image.convert("LA").convert("RGBA") if image.mode == "La" else image.convert("RGBA")
        background = Image.new("RGBA", image.size, (255, 255, 255, 255))
        return Image.alpha_composite(background, image).convert("RGB")
    return image if image.mode == "RGB" else image.convert("RGB")


def _eight_bits(values: np.ndarray[Any, np.dtype[Any]], mode: str) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return grey values as uint8.

    Mode I;16 has 16 bits. Modes I and F do not tell their range: values above 255 mean 16 bits, and floats up to 1 mean shares of white.
    """
    found = np.nan_to_num(values.astype(np.float64))
    most = found.max(initial=0.0)
    scale = 1 / 257 if mode.startswith("I;16") or most > 255 else 255.0 if mode == "F" and most <= 1 else 1.0
    grey: np.ndarray[Any, np.dtype[np.uint8]] = np.clip(np.rint(found * scale), 0, 255).astype(np.uint8)
    return grey
