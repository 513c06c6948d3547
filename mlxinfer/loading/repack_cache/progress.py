"""Progress of earlier processes with a copy, stored where the finished copy will have its header.

Without that, a short process would spend all its time on comparing what others have written, and a copy of several hundred MB would never
be finished. What the record says is believed: the checksums of a finished copy are verified before its first use anyway.
"""

from __future__ import annotations

import json
import os
import struct
import zlib
from dataclasses import field

from ...util.dataclass import dataclass
from .layout import CopyLayout

_RECORD = struct.Struct("<8sII")
"""Magic, bytes of the record in JSON, their CRC-32."""
_MAGIC = b"mlxipart"


@dataclass(slots=True)
class WriteProgress:
    """Parts of a copy that are in its unfinished file."""

    layout: int
    """Checksum of the source and the places of all matrices: a record for another layout says nothing."""
    done: dict[str, int] = field(default_factory=dict)
    """CRC-32 of each whole matrix with its preamble, by its key."""
    key: str = ""
    """The matrix that was being written; empty for none."""
    nbytes: int = 0
    """Bytes of that matrix which are written."""
    checksum: int = 0
    """CRC-32 of its preamble and these bytes."""

    @classmethod
    def read(cls, descriptor: int, planned: CopyLayout) -> WriteProgress:
        """Read the record of the file; without one for this layout there is no progress. Raises OSError."""
        found = cls(layout_of(planned))
        magic, size, checksum = _RECORD.unpack(os.pread(descriptor, _RECORD.size, 0).ljust(_RECORD.size, b"\0"))
        text = os.pread(descriptor, size, _RECORD.size) if magic == _MAGIC and size < planned.base else b""
        if not text or zlib.crc32(text) != checksum:
            return found
        layout, done, key, nbytes, partial = json.loads(text)
        ends = [planned.offsets[name] + planned.sizes[name] for name in done] if layout == found.layout else []
        if key and layout == found.layout:
            ends.append(planned.offsets[key] + nbytes)
        if layout != found.layout or max(ends, default=0) > os.fstat(descriptor).st_size:
            return found
        return cls(layout, done, key, nbytes, partial)

    def write(self, descriptor: int, planned: CopyLayout) -> None:
        """Replace the record. It is shorter than the header and the index of the finished copy. Raises OSError."""
        text = json.dumps([self.layout, self.done, self.key, self.nbytes, self.checksum]).encode()
        record = _RECORD.pack(_MAGIC, len(text), zlib.crc32(text)) + text
        if len(record) <= planned.base:
            os.pwrite(descriptor, record, 0)


def layout_of(planned: CopyLayout) -> int:
    """A checksum of everything that a record depends on."""
    return zlib.crc32(planned.head(dict.fromkeys(planned.sizes, 0)))
