"""Models of the Hugging Face hub and of its cache on this machine."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import huggingface_hub
from huggingface_hub import constants, errors
from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]  # httpx's, whichever the hub's client is built on

from ...errors import HubError, ModelNotFoundError, UnsupportedModelError
from .foreign import is_model_file

# Weights as safetensors, and the small files that describe the model and its tokenizer; never code or pickles, and of the
# subfolders only those of sentence-transformers, such as 1_Pooling.
_WANTED = ["*.safetensors", "*.json", "*.jinja", "*.txt", "tokenizer.model", "spiece.model", "tiktoken.model", "*.tiktoken"]
_UNWANTED = ["[!0-9]*/*", "consolidated*.safetensors", "adapter*"]
_SEARCH_SECONDS = 10.0
_ID = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+)(?P<file>/[\w./-]+\.gguf)?(@(?P<revision>[\w./-]+))?")


@dataclass(frozen=True, slots=True)
class HubId:
    """An id such as `org/name`, `org/name@revision`, or `org/name/file.gguf` for one GGUF file of a repository."""

    repo: str
    """`organization/name`."""
    file: str | None = None
    """A GGUF file of the repository; None for all files that a model needs."""
    revision: str | None = None
    """A branch, tag or commit; None for the default branch."""

    @classmethod
    def parse(cls, text: str) -> HubId | None:
        match = _ID.fullmatch(text)
        if match is None or ".." in text:
            return None
        return cls(match["repo"], match["file"][1:] if match["file"] else None, match["revision"])


def download(hub_id: HubId) -> Path:
    """Return a local directory (or GGUF file) of the model, and download what is not cached. An interrupted download resumes.

    Raises `HubError`, `ModelNotFoundError`, `UnsupportedModelError`.
    """
    wanted, unwanted = (_all_parts(hub_id.file), []) if hub_id.file else (_WANTED, _UNWANTED)
    try:
        found = huggingface_hub.snapshot_download(hub_id.repo, revision=hub_id.revision, allow_patterns=wanted, ignore_patterns=unwanted)
    except errors.HFValidationError:
        raise ModelNotFoundError(f"{hub_id.repo!r} is neither a local path nor a valid hub id") from None
    except OSError as error:
        raise _explain(error, hub_id) from None
    except HTTPError as error:
        raise HubError(f"cannot download {hub_id.repo}: {_line(error)}") from None
    directory = Path(found)
    if hub_id.file:
        if not (directory / hub_id.file).exists():
            raise ModelNotFoundError(f"{hub_id.repo} has no file {hub_id.file}")
        return directory / hub_id.file
    if not any(directory.glob("*.safetensors")):
        raise UnsupportedModelError(
            f"{hub_id.repo} has no safetensors weights (pickled ones are never read); of a GGUF repository, name a file: "
            f"{hub_id.repo}/FILE.gguf"
        )
    return directory


def search_hub(text: str, most: int = 20) -> list[str]:
    """Return ids of repositories with MLX or GGUF weights whose names match `text`, the most downloaded first. Raises `HubError`."""
    if is_offline():
        raise HubError("HF_HUB_OFFLINE is set")
    found: dict[str, int] = {}
    try:
        for library in ("mlx", "gguf"):
            wanted = {"search": text, "filter": library, "sort": "downloads", "direction": "-1", "limit": str(most)}
            answer = huggingface_hub.get_session().get(f"{constants.ENDPOINT}/api/models", params=wanted, timeout=_SEARCH_SECONDS)
            answer.raise_for_status()
            found |= {str(model["id"]): int(model.get("downloads") or 0) for model in answer.json()}
    except (OSError, HTTPError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise HubError(f"{constants.ENDPOINT.partition('://')[2]} cannot be reached ({_line(error)})") from None
    return sorted(found, key=lambda repo: -found[repo])[:most]


def is_offline() -> bool:
    """True if the user forbids to ask the hub."""
    return bool(constants.HF_HUB_OFFLINE)


def is_cached(hub_id: HubId) -> bool:
    """True if the weights are in the hub's cache. Asks no server."""
    wanted = _all_parts(hub_id.file) if hub_id.file else _WANTED
    try:
        found = huggingface_hub.snapshot_download(hub_id.repo, revision=hub_id.revision, allow_patterns=wanted, local_files_only=True)
    except (OSError, errors.HFValidationError):
        return False
    return (Path(found) / hub_id.file).exists() if hub_id.file else any(Path(found).glob("*.safetensors"))


def _all_parts(file: str) -> list[str]:
    """Names of all parts of a split GGUF file."""
    return [re.sub(r"-\d{5}-of-(\d{5})\.gguf$", r"-*-of-\1.gguf", file)]


def _explain(error: OSError, hub_id: HubId) -> HubError | ModelNotFoundError:
    repo = hub_id.repo
    if isinstance(error, errors.GatedRepoError):
        return HubError(f"{repo} is gated: accept its terms at {constants.ENDPOINT}/{repo}, then log in with: hf auth login")
    if isinstance(error, errors.RepositoryNotFoundError):
        return ModelNotFoundError(f"{repo} is not on this machine, and no model on the hub that you may see (log in with: hf auth login)")
    if isinstance(error, errors.RevisionNotFoundError):
        return HubError(f"{repo} has no revision {hub_id.revision!r}")
    if isinstance(error, errors.IncompleteSnapshotError):
        return HubError(f"{repo} was downloaded only in part, and the hub cannot be reached for the rest: try again with a network")
    if isinstance(error, (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled)):
        hub = constants.ENDPOINT.partition("://")[2]
        why = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else f"{hub} cannot be reached"
        return HubError(f"{repo} is not on this machine, and {why}")
    return HubError(f"cannot download {repo}: {_line(error)}")


def _line(error: Exception) -> str:
    strerror = getattr(error, "strerror", None)
    return str(strerror or error or type(error).__name__).strip().splitlines()[0]


@dataclass(frozen=True, slots=True)
class CachedRepo:
    """A model in the hub's cache: a repository, or one GGUF file of it."""

    repo: str
    """`organization/name`, with `/file.gguf` for a GGUF file."""
    path: Path
    """Directory of the newest revision, or the file in it."""
    nbytes: int
    """Bytes of all revisions on disk, or of the file."""
    revisions: tuple[str, ...]
    """Hashes of the cached revisions; none for a file."""


def cached_models() -> list[CachedRepo]:
    """List language models in the hub's cache: those with a config and safetensors, and GGUF files."""
    try:
        cache = huggingface_hub.scan_cache_dir(constants.HF_HUB_CACHE)
    except errors.CacheNotFound:
        return []
    found = []
    for repo in cache.repos:
        newest = max(repo.revisions, key=lambda revision: revision.last_modified, default=None)
        if repo.repo_type != "model" or newest is None:
            continue
        path = newest.snapshot_path
        if (path / "config.json").exists() and any(path.glob("*.safetensors")):
            hashes = tuple(revision.commit_hash for revision in repo.revisions)
            found.append(CachedRepo(repo.repo_id, path, repo.size_on_disk, hashes))
        else:
            files = [file for file in path.rglob("*.gguf") if is_model_file(file)]
            found += [CachedRepo(f"{repo.repo_id}/{file.relative_to(path)}", file, _file_bytes(file), ()) for file in files]
    return sorted(found, key=lambda repo: repo.repo)


def _file_bytes(file: Path) -> int:
    return sum(part.stat().st_size for part in _parts(file))


def _parts(file: Path) -> list[Path]:
    """A GGUF file with its later parts."""
    return sorted(file.parent.glob(_all_parts(file.name)[0]))


def delete_cached(repo: CachedRepo) -> int:
    """Delete every revision, or the file, and return the freed bytes. Raises OSError."""
    if not repo.revisions:
        for link in _parts(repo.path):
            stored = link.resolve()
            link.unlink()
            stored.unlink(missing_ok=True)
        return repo.nbytes
    strategy = huggingface_hub.scan_cache_dir(constants.HF_HUB_CACHE).delete_revisions(*repo.revisions)
    strategy.execute()
    return strategy.expected_freed_size
