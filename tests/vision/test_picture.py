"""Pictures of all kinds become upright RGB pixels; hostile, damaged and foreign files are refused without decoding much."""

from __future__ import annotations

import base64
import io
import struct
import subprocess
import sys
import tracemalloc
import zlib
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageOps

from mlxinfer.errors import ImageError
from mlxinfer.vision.picture import MAX_BYTES, MAX_SIDE, Picture, bytes_of_url, picture_from_url, picture_size, read_picture

SIZE = 6, 4  # width, height
RED, BLUE, WHITE = (255, 0, 0), (0, 0, 255), (255, 255, 255)


def noise(mode: str = "RGB", size: tuple[int, int] = SIZE, seed: int = 0) -> Image.Image:
    values = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 4), dtype=np.uint8)
    return Image.fromarray(values).convert("RGB").convert(mode)


def saved(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def png(width: int, height: int, *, depth: int = 8, color: int = 2, rows: bytes = b"", before: bytes = b"", after: bytes = b"") -> bytes:
    """A PNG file with further chunks before and after its pixels."""
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, color, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + before + chunk(b"IDAT", zlib.compress(rows)) + after + chunk(b"IEND", b"")


def test_sides_are_limited() -> None:
    """Pillow takes 48 bytes for each pixel of a side to resize it: 3 GB for one row of 60 million."""
    assert picture_size(png(MAX_SIDE, 1)) == (1, MAX_SIDE)
    for size in ((MAX_SIDE + 1, 1), (1, MAX_SIDE + 1), (1, 60_000_000)):
        with pytest.raises(ImageError, match="a side has at most 65535: cut it into parts"):
            picture_size(png(*size))


@cache
def bombs() -> dict[str, bytes]:
    """Files of a few KB that declare hundreds of MB, or decompress to 64 MB."""
    zeros = zlib.compress(bytes(64 << 20))
    row = b"\0" + bytes(3)
    webp = b"VP8X" + struct.pack("<I", 10) + bytes(4) + (16382).to_bytes(3, "little") * 2
    return {
        "PNG header": png(20_000, 20_000),
        "huge PNG header": png(2**31 - 1, 2**31 - 1),
        "zTXt chunk": png(1, 1, rows=row, before=chunk(b"zTXt", b"Comment\0\0" + zeros)),
        "iTXt chunk": png(1, 1, rows=row, before=chunk(b"iTXt", b"Comment\0\1\0\0\0" + zeros)),
        "late zTXt chunk": png(1, 1, rows=row, after=chunk(b"zTXt", b"Comment\0\0" + zeros)),
        "iCCP chunk": png(1, 1, rows=row, before=chunk(b"iCCP", b"Profile\0\0" + zeros)),
        "BMP header": b"BM" + struct.pack("<IHHI", 54, 0, 0, 54) + struct.pack("<IiiHHIIiiII", 40, 30_000, 30_000, 1, 24, 0, 0, 0, 0, 0, 0),
        "GIF header": b"GIF89a"
        + struct.pack("<HHBBB", 65_535, 65_535, 0, 0, 0)
        + b"\x2c"
        + struct.pack("<HHHHB", 0, 0, 65_535, 65_535, 0)
        + b"\2\0;",
        "WebP header": b"RIFF" + struct.pack("<I", 4 + len(webp)) + b"WEBP" + webp,
    }


BOMBS = (
    *(f"{kind} header" for kind in ("PNG", "huge PNG", "BMP", "GIF", "WebP")),
    *(f"{kind} chunk" for kind in ("zTXt", "iTXt", "late zTXt", "iCCP")),
)


@pytest.mark.parametrize("name", BOMBS)
def test_bombs_are_refused(name: str) -> None:
    data = bombs()[name]
    assert len(data) < 1 << 20
    for read in (read_picture, picture_size):
        if read is picture_size and "late" in name:
            continue
        with pytest.raises(ImageError) as caught:
            read(data)
        assert "\n" not in str(caught.value)
        if "header" in name:
            assert "pixels" in str(caught.value)


_MEMORY = """
import pathlib, resource, sys
from mlxinfer.errors import ImageError
from mlxinfer.vision.picture import picture_size, read_picture
files = [path.read_bytes() for path in sorted(pathlib.Path(sys.argv[1]).iterdir())]
read_picture(files.pop(0))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for data in files:
    for read in (picture_size, read_picture):
        try:
            read(data)
        except ImageError:
            pass
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_bombs_take_no_memory(tmp_path: Path) -> None:
    for number, data in enumerate([saved(noise()), *bombs().values()]):
        (tmp_path / f"{number:02}").write_bytes(data)
    done = subprocess.run([sys.executable, "-c", _MEMORY, str(tmp_path)], capture_output=True, text=True, check=True)
    grown = int(done.stdout) // (1024 if sys.platform == "darwin" else 1)
    assert grown < 40 << 10, f"{grown} KB"


def _truncated() -> dict[str, bytes]:
    large = noise(size=(200, 150))
    files = {kind: saved(large, kind) for kind in ("PNG", "JPEG", "WEBP", "BMP")}
    return {kind: data[: len(data) * 2 // 3] for kind, data in files.items()}


@pytest.mark.parametrize("kind", list(_truncated()))
def test_truncated_files_are_refused(kind: str) -> None:
    with pytest.raises(ImageError, match="cannot be decoded"):
        read_picture(_truncated()[kind])


FOREIGN = {
    "SVG": b'<?xml version="1.0"?>\n<!-- a -->\n<svg xmlns="http://www.w3.org/2000/svg"/>',
    "SVG ": b"  <svg width='1'/>",
    "HEIC": b"\0\0\0\x18ftypheic\0\0\0\0mif1heic",
    "AVIF": b"\0\0\0\x18ftypavif\0\0\0\0",
    "TIFF": b"II*\0\x08\0\0\0",
    "PDF": b"%PDF-1.7\n",
    "PSD": b"8BPS\0\1",
    "PostScript": b"%!PS-Adobe-3.0 EPSF-3.0\n",
    "HTML": b"<!DOCTYPE html><html>",
    "MP4": b"\0\0\0\x18ftypisom",
    "JPEG XL": b"\xff\x0a\0\0",
}


@pytest.mark.parametrize("name", list(FOREIGN))
def test_foreign_formats_are_named(name: str) -> None:
    with pytest.raises(ImageError, match=f"^{name.strip()} is not supported: convert"):
        read_picture(FOREIGN[name])


@pytest.mark.parametrize(
    "data", [b"", b"hello", b"\x89PNG\r\n\x1a\n", bytes(1000), b"GIF89a", b"\xff\xd8\xff\xe0", b"RIFF\0\0\0\0WEBPVP8 "]
)
def test_other_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(ImageError):
        read_picture(data)
    with pytest.raises(ImageError):
        picture_size(data)


@pytest.mark.parametrize("kind", ["TIFF", "ICO", "PPM", "EPS"])
def test_formats_of_pillow_beyond_the_list_are_refused(kind: str) -> None:
    with pytest.raises(ImageError):
        read_picture(saved(noise(size=(32, 32)), kind))


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP"])
def test_formats(kind: str) -> None:
    image = noise("P") if kind == "GIF" else noise()
    data = saved(image, kind)
    found = read_picture(data)
    with Image.open(io.BytesIO(data)) as opened:
        assert np.array_equal(found.pixels, np.asarray(opened.convert("RGB")))
    assert found.format == kind
    assert found.size == picture_size(data) == (4, 6)
    assert found.pixels.dtype == np.uint8
    assert not found.first_frame_only


def test_pixels_are_immutable_and_have_a_digest() -> None:
    first, same, other = (read_picture(saved(noise(seed=seed), kind)) for seed, kind in ((0, "PNG"), (0, "BMP"), (1, "PNG")))
    assert first.digest == same.digest != other.digest
    assert len(first.digest) == 32
    assert read_picture(np.zeros((2, 3, 3), np.uint8)).digest != read_picture(np.zeros((3, 2, 3), np.uint8)).digest
    with pytest.raises(ValueError):
        first.pixels[0, 0, 0] = 1


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "PNG after the pixels", "image"])
def test_orientations(kind: str, orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    image = noise(size=(24, 16))
    if kind == "PNG after the pixels":
        plain = saved(image)
        data = plain[:-12] + chunk(b"eXIf", exif.tobytes().removeprefix(b"Exif\0\0")) + plain[-12:]
    else:
        data = saved(image, "PNG" if kind == "image" else kind, exif=exif)
    with Image.open(io.BytesIO(data)) as opened:
        upright = ImageOps.exif_transpose(opened)
        found = read_picture(opened if kind == "image" else data)
    assert np.array_equal(found.pixels, np.asarray(upright))
    assert picture_size(data) == found.size == ((24, 16) if orientation >= 5 else (16, 24))


def _over_white(pixels: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    values = pixels.astype(np.float64)
    alpha = values[..., 3:] / 255
    return values[..., :3] * alpha + 255 * (1 - alpha)


def test_transparency_is_over_white() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (5, 7, 4), dtype=np.uint8)
    for source in (
        pixels,
        Image.fromarray(pixels),
        saved(Image.fromarray(pixels)),
        saved(Image.fromarray(pixels), "WEBP", lossless=True, exact=True),
    ):
        assert np.abs(read_picture(source).pixels - _over_white(pixels)).max() <= 1


def _transparent_palette() -> Image.Image:
    image = Image.new("P", (2, 1))
    image.putpalette([*RED, *BLUE])
    image.putdata([0, 1])
    return image


MODES: dict[str, tuple[Callable[[], bytes], list[tuple[int, int, int]]]] = {
    "palette with tRNS": (lambda: saved(_transparent_palette(), transparency=0), [WHITE, BLUE]),
    "palette": (lambda: saved(_transparent_palette()), [RED, BLUE]),
    "grey with tRNS": (lambda: png(2, 1, color=0, rows=b"\0\x10\x20", before=chunk(b"tRNS", b"\0\x10")), [WHITE, (32, 32, 32)]),
    "RGB with tRNS": (
        lambda: png(2, 1, rows=b"\0" + bytes([*RED, *BLUE]), before=chunk(b"tRNS", b"\0\xff\0\0\0\0")),
        [WHITE, BLUE],
    ),
    "grey with alpha": (lambda: png(2, 1, color=4, rows=b"\0\x10\x00\x20\xff"), [WHITE, (32, 32, 32)]),
    "black and white": (lambda: png(2, 1, depth=1, color=0, rows=b"\0\x40"), [(0, 0, 0), WHITE]),
    "16-bit grey": (lambda: png(2, 1, depth=16, color=0, rows=b"\0" + struct.pack(">HH", 0x8080, 0xFFFF)), [(128, 128, 128), WHITE]),
    "16-bit RGB": (lambda: png(2, 1, depth=16, rows=b"\0" + struct.pack(">6H", 0xFFFF, 0, 0, 0, 0, 0xFFFF)), [RED, BLUE]),
}


@pytest.mark.parametrize("name", list(MODES))
def test_modes(name: str) -> None:
    make, wanted = MODES[name]
    assert read_picture(make()).pixels[0].tolist() == [list(color) for color in wanted]


def test_orientation_before_transparency() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    data = saved(_transparent_palette(), transparency=0, exif=exif)
    assert read_picture(data).pixels[:, 0].tolist() == [list(WHITE), list(BLUE)]


def test_cmyk_jpeg() -> None:
    data = saved(Image.new("CMYK", (8, 8), (0, 255, 255, 0)), "JPEG", quality=100)
    assert np.abs(read_picture(data).pixels.astype(int) - np.array(RED)).max() <= 4


@pytest.mark.parametrize(
    ("values", "grey"),
    [
        (np.array([[0, 65535, 257 * 7]], np.uint16), [0, 255, 7]),
        (np.array([[0, 65535, 257 * 7]], np.int32), [0, 255, 7]),
        (np.array([[0, 255, 7]], np.int32), [0, 255, 7]),
        (np.array([[0, 1, 0.5]], np.float32), [0, 255, 128]),
        (np.array([[0, 255, np.nan]], np.float32), [0, 255, 0]),
    ],
)
def test_wide_grey_images_are_scaled(values: np.ndarray[Any, Any], grey: list[int]) -> None:
    assert read_picture(Image.fromarray(values)).pixels[0, :, 1].tolist() == grey


@pytest.mark.parametrize("kind", ["GIF", "PNG", "WEBP"])
def test_animations_give_their_first_frame(kind: str) -> None:
    frames = [Image.new("RGB", (8, 8), color) for color in (RED, BLUE)]
    options = {"lossless": True} if kind == "WEBP" else {}
    found = read_picture(saved(frames[0], kind, save_all=True, append_images=frames[1:], duration=50, **options))
    assert found.first_frame_only
    assert found.pixels[0, 0].tolist() == list(RED)


def test_arrays() -> None:
    grey = np.arange(6, dtype=np.uint8).reshape(2, 3)
    for array in (grey, grey[..., None], np.repeat(grey[..., None], 3, -1), np.repeat(grey[..., None], 3, -1)[::-1][::-1]):
        assert np.array_equal(read_picture(array).pixels, np.repeat(grey[..., None], 3, -1))
    source = np.zeros((2, 2, 3), np.uint8)
    found = read_picture(source)
    source[:] = 255
    assert found.pixels.max() == 0


@pytest.mark.parametrize(
    "array", [np.zeros((2, 2, 3)), np.zeros((2, 2, 2), np.uint8), np.zeros((0, 2, 3), np.uint8), np.zeros(3, np.uint8)]
)
def test_other_arrays_are_refused(array: np.ndarray[Any, Any]) -> None:
    with pytest.raises(ImageError, match="array must be"):
        read_picture(array)


def test_large_arrays_and_images_are_refused() -> None:
    with pytest.raises(ImageError, match="more than 64 million"):
        read_picture(np.broadcast_to(np.zeros(3, np.uint8), (8001, 8001, 3)))


def test_other_types_are_refused() -> None:
    with pytest.raises(ImageError, match="not int"):
        read_picture(5)  # type: ignore[arg-type]


def test_files(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(saved(noise()))
    assert read_picture(path).digest == read_picture(str(path)).digest == read_picture(saved(noise())).digest
    for wrong in (tmp_path / "missing.png", tmp_path, "a\0b"):
        with pytest.raises(ImageError, match="cannot be read"):
            read_picture(wrong)
    with path.open("wb") as file:
        file.truncate(MAX_BYTES + 1)
    with pytest.raises(ImageError, match="more than 20 MB"):
        read_picture(path)
    with pytest.raises(ImageError, match="more than 20 MB"):
        read_picture(path.read_bytes())


def _same(found: Picture) -> bool:
    return found.digest == read_picture(saved(noise())).digest


def test_data_urls() -> None:
    text = base64.b64encode(saved(noise())).decode()
    assert _same(picture_from_url(f"data:image/png;base64,{text}"))
    assert _same(picture_from_url(f"DATA:;base64,{text[:20]}\n {text[20:]}"))
    assert _same(read_picture("data:image/png;charset=x;base64," + text.replace("+", "%2B")))
    assert _same(picture_from_url("data:image/png," + "".join(f"%{byte:02x}" for byte in saved(noise()))))


@pytest.mark.parametrize(
    "url", ["data:image/png;base64,abc", "data:image/png;base64,====", "data:image/png;base64,a$b=", "data:image/png", "data:,"]
)
def test_damaged_data_urls_are_refused(url: str) -> None:
    with pytest.raises(ImageError):
        picture_from_url(url)


@pytest.mark.parametrize(
    "url",
    [
        "http://169.254.169.254/latest",
        "https://example.com/a.png",
        "file:///etc/passwd",
        "FILE:///etc/passwd",
        "ftp://a/b",
        "/etc/passwd",
        "a.png",
        "",
    ],
)
def test_other_urls_are_not_fetched(url: str) -> None:
    with pytest.raises(ImageError, match="data: URL"):
        picture_from_url(url)
    if "://" in url:
        with pytest.raises(ImageError, match="data: URL"):
            read_picture(url)


@pytest.mark.parametrize("sign", ["%", " A", "%2B"])
def test_memory_does_not_grow_with_the_number_of_signs(sign: str) -> None:
    url = "data:;base64," + sign * (6_000_000 // len(sign))
    tracemalloc.start()
    try:
        with suppress(ImageError):
            bytes_of_url(url)
        assert tracemalloc.get_traced_memory()[1] < 6 * len(url)
    finally:
        tracemalloc.stop()


def test_long_data_urls_are_refused_before_decoding() -> None:
    with pytest.raises(ImageError, match="more than 20 MB"):
        picture_from_url("data:;base64," + "A" * (2 * MAX_BYTES + 10))
