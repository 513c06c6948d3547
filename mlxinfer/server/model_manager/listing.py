"""The models of the command line and of a folder."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ...config import EngineArgs
from ...engine.open_model import with_shares
from ...errors import MemoryPlanError, ServerError
from ...loading.find.resolve import local_place
from ..process import ServerModels
from .model_slot import FOR_EVER, ModelSlot
from .registry import Registry, public_name

if TYPE_CHECKING:
    from ...engine.async_llm import AsyncLLM

FOLDER_KEEP_ALIVE_S = 300.0
"""Seconds that a model of a folder stays loaded without requests."""
_SHARE_AT_START = 0.5
"""Part of the memory for models loaded at the start, if requests may ask for further models."""


class Listing:
    """Collects models. Names of the same files with the same settings share a slot."""

    def __init__(
        self,
        args: EngineArgs,
        open_model: Callable[[EngineArgs], AsyncLLM],
        keep_alive_s: float | None = None,
        adapters: Mapping[str, str] | None = None,
    ) -> None:
        """`args` are the settings of every model. `keep_alive_s` is how long each model stays loaded without requests; None means for
        ever for named models, and `FOLDER_KEEP_ALIVE_S` for models of a folder. `adapters` are paths by `MODEL:NAME`; a single model
        needs no `MODEL:`."""
        self._adapters = adapters or {}
        self._args = replace(args, memory_gb=None)
        self._memory = None if args.memory_gb is None else int(args.memory_gb * 1e9)
        self._open = open_model
        self._keep_alive_s = keep_alive_s
        self._slots: dict[str, ModelSlot] = {}
        self._by_place: dict[object, ModelSlot] = {}
        self._at_start: list[ModelSlot] = []
        self._notes: list[str] = []

    def add(self, model: str) -> None:
        """Add a model that is loaded at the start: `NAME=MODEL`, or a model that has its own name. Raises `ServerError`."""
        name, target = public_name(model)
        if name in self._slots:
            raise ServerError(f"two models are called {name!r}: give one of them another name with NAME=MODEL")
        slot = self._list(name, target, FOR_EVER)
        if slot not in self._at_start:
            self._at_start.append(slot)

    def add_folder(self, folder: Path) -> None:
        """Add the models of a folder, which are loaded on request. Names that are already taken stay with their models. Raises
        `ServerError`."""
        found = list(models_in(folder))
        if not found:
            raise ServerError(f"there are no models in {folder}: it must have GGUF files, or folders with a model each")
        for path in found:
            try:
                name = public_name(str(path))[0]
            except ServerError as error:
                self._notes.append(f"left out of {folder}: {error}")
                continue
            if name not in self._slots:
                self._list(name, str(path), FOLDER_KEEP_ALIVE_S)
            elif self._by_place.get(local_place(str(path))) is not self._slots[name]:
                self._notes.append(f"left out of {folder}: {path.name}, as another is called {name!r} (NAME=MODEL gives another name)")

    def models(self, aliases: Mapping[str, str], pinned: Sequence[str]) -> ServerModels:
        """All models. A pinned model is loaded at the start and never unloaded. Raises `MLXInferError`."""
        self._assign_adapters()
        registry = Registry(self._slots, aliases)
        for name in pinned:
            slot = self._slots.get(aliases.get(name, name))
            if slot is None:
                raise ServerError(f"--pin {name}: unknown model; available: {', '.join(self._slots)}")
            slot.pinned = True
            if slot not in self._at_start:
                self._at_start.append(slot)
        self._at_start.sort(key=lambda slot: not slot.pinned)
        self._divide_memory()
        return ServerModels(registry=registry, at_start=self._at_start, memory=self._memory, notes=self._notes)

    def _list(self, name: str, target: str, keep_alive_s: float) -> ModelSlot:
        place = local_place(target)
        slot = self._by_place.get(place)
        if slot is None:
            own = keep_alive_s if self._keep_alive_s is None else self._keep_alive_s
            slot = self._by_place[place] = ModelSlot(replace(self._args, path_or_id=target), self._open, keep_alive_s=own)
        self._slots[name] = slot
        return slot

    def _assign_adapters(self) -> None:
        only = next(iter(self._slots)) if len(self._slots) == 1 else ""
        given: dict[ModelSlot, dict[str, str]] = {}
        for name, path in self._adapters.items():
            owner, _, adapter = name.rpartition(":")
            slot = self._slots.get(owner or only)
            if slot is None:
                raise ServerError(f"which model is the adapter {name!r} for? Say --adapter MODEL:NAME=PATH, of {', '.join(self._slots)}")
            names = [each for each, other in self._slots.items() if other is slot]
            if given.setdefault(slot, {}).setdefault(adapter, path) != path:
                raise ServerError(f"{' and '.join(names)} are one model with two adapters {adapter!r}: give one of them another name")
        for slot, adapters in given.items():
            assert slot.args is not None
            slot.args = replace(slot.args, adapters=adapters)

    def _divide_memory(self) -> None:
        """Divide the memory among the models that are loaded at the start, if they fit together. Otherwise each model gets the memory
        left when it is loaded."""
        part = 1.0 if len(self._at_start) == len(set(self._slots.values())) else _SHARE_AT_START
        known = [slot.args for slot in self._at_start if slot.args is not None]
        try:
            shared = with_shares(known, part, most=self._memory)
        except MemoryPlanError:
            return
        for slot, args in zip(self._at_start, shared, strict=True):
            slot.args = args


def models_in(folder: Path) -> Iterator[Path]:
    """GGUF files, and folders with a config.json or a single GGUF file. Of a GGUF file in several parts only the first counts. Raises
    `ServerError`."""
    try:
        entries = sorted(folder.expanduser().iterdir())
    except OSError as error:
        raise ServerError(f"cannot read --models-dir {folder}: {error.strerror or error}") from None
    yield from (path.absolute() for path in entries if not path.name.startswith(".") and _is_model(path))


def _is_model(path: Path) -> bool:
    if not os.access(path, os.R_OK | os.X_OK if path.is_dir() else os.R_OK):
        return False
    if path.is_dir():
        return (path / "config.json").is_file() or len(list(path.glob("*.gguf"))) == 1
    return path.suffix == ".gguf" and not _later_part(path.stem)


def _later_part(stem: str) -> bool:
    """True for a part of a GGUF file other than the first, such as NAME-00002-of-00005."""
    parts = stem.rsplit("-", 3)
    return len(parts) == 4 and parts[2] == "of" and parts[1].isdigit() and int(parts[1]) > 1
