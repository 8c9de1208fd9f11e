"""The desired state of this node, kept on disk: the agent works on while the API server is away.

Only an instruction that the API server itself gave in this process's life releases memory. Neither
the file nor a missing HostMemoryNode releases anything.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

from hostprep.agent.messages import DesiredPool, Failure
from hostprep.api.codec import JsonObject, json_field
from hostprep.api.node_resource import PoolEntry, entries_of
from hostprep.api.pool_resource import spec_from_policy
from hostprep.errors import BadInputError, FailedError, HostprepError
from hostprep.kube.logs import Logger
from hostprep.linux.files import atomic_write, remove_file

FILE_NAME = "desired.json"
_VERSION = 1
_MAX_BYTES = 16 << 20


class Source(Enum):
    """Where an instruction comes from."""

    NOTHING = "nothing"
    """There is none: no object, or no answer yet. Everything is kept as it is."""
    SAVED = "saved"
    """Read from the file while the API server was away."""
    LIVE = "live"
    """The object as the API server has it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DesiredState(JsonObject):
    """The entries of a HostMemoryNode, and what they came with."""

    source: Source = Source.NOTHING
    uid: str = ""
    generation: int = 0
    boot_id: str = field(default="", metadata=json_field(key="boot_id"))
    """Of the boot in which it was saved."""
    entries: tuple[PoolEntry, ...] = field(default=(), metadata=json_field(key="pools"))

    @classmethod
    def of_object(cls, document: Mapping[str, Any], *, boot_id: str) -> DesiredState:
        """Return what a HostMemoryNode asks for. Raises BadInputError for an unreadable one."""
        try:
            metadata = document["metadata"]
            return cls(
                source=Source.LIVE,
                uid=str(metadata.get("uid") or ""),
                generation=int(metadata.get("generation") or 0),
                boot_id=boot_id,
                entries=entries_of(document),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise BadInputError(
                f"the HostMemoryNode cannot be read: {type(error).__name__}: {error}",
                reason="BadNode",
                remedy="delete it: the operator creates it again, and memory is kept",
            ) from error

    @property
    def asks_for_memory(self) -> bool:
        """Whether it has an entry that is not absent."""
        return any(not entry.absent for entry in self.entries)

    def has_same_content_as(self, other: DesiredState) -> bool:
        """Whether saving the other one over this one would change nothing that matters."""
        return replace(self, source=other.source) == other


# --- what the worker is to do


@dataclass(frozen=True, slots=True)
class Instruction:
    """What the worker is to do: pools to reconcile, and entries that are not carried out."""

    pools: tuple[DesiredPool, ...] = ()
    refused: Mapping[str, Failure] = field(default_factory=dict)
    """Entries that make no sense, by pool: left as they are."""
    withheld: frozenset[str] = frozenset()
    """Absent entries that the API server has not confirmed."""


def instruction_of(desired: DesiredState) -> Instruction:
    """Return what to do. Without an object: nothing at all."""
    if desired.source is Source.NOTHING:
        return Instruction()
    pools: list[DesiredPool] = []
    refused: dict[str, Failure] = {}
    withheld: set[str] = set()
    for entry in desired.entries:
        if entry.absent and desired.source is not Source.LIVE:
            withheld.add(entry.name)
            continue
        try:
            spec = spec_from_policy(entry.name, entry.uid, entry.policy, entry.absent)
        except HostprepError as error:
            refused[entry.name] = Failure("BadPolicy", str(error))
        else:
            pools.append(
                DesiredPool(
                    spec=spec,
                    key=entry_key(entry),
                    leave_dirty=entry.scrubbed_on_claim,
                    at_boot=entry.reserved_at_boot,
                )
            )
    return Instruction(tuple(pools), refused, frozenset(withheld))


def entry_key(entry: PoolEntry) -> str:
    """Return a hash of the whole entry, which tells one version of it from another."""
    text = json.dumps(entry.to_json(), sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


# --- the file


@dataclass
class DesiredStateStore:
    """Saves the desired state on a disk that may be full or read-only.

    What could not be saved is tried again, and is no reason to stop.
    """

    folder: str
    log: Logger
    saved: DesiredState | None = None
    """What is on the disk, as far as is known."""
    _unsaved: DesiredState | None = None
    _complaint: str = ""

    def read(self) -> DesiredState | None:
        """Read what an earlier run saved; None where there is nothing that can be used."""
        try:
            self.saved = read_saved(self.folder)
        except HostprepError as error:
            self.log.warning("saved_state_unreadable", error=error.message, remedy=error.remedy)
        return self.saved

    def save(self, desired: DesiredState) -> None:
        """Save it, now or as soon as that works."""
        self._unsaved = desired
        self.try_again()

    def try_again(self) -> None:
        """Save what is not saved yet. Logs the reason once where that fails."""
        if self._unsaved is None:
            return
        try:
            if self.saved is None or not self.saved.has_same_content_as(self._unsaved):
                save(self.folder, self._unsaved)
        except HostprepError as error:
            if error.message != self._complaint:
                self._complaint = error.message
                self.log.warning("not_saved", error=error.message, remedy=error.remedy)
        else:
            self.saved, self._unsaved, self._complaint = self._unsaved, None, ""


def save(folder: str, desired: DesiredState) -> None:
    """Write the entries, at once or not at all; with none the file goes. Raises FailedError."""
    path = f"{folder}/{FILE_NAME}"
    document = {"version": _VERSION, **desired.to_json()}
    del document["source"]
    try:
        if desired.entries:
            atomic_write(path, json.dumps(document, indent=1).encode(), mode=0o600)
        else:
            remove_file(path)
    except HostprepError as error:
        raise FailedError(
            error.message,
            reason=error.reason,
            remedy="make room there, or give another --state-dir; until then a start without the"
            " API server begins from older entries, or none",
        ) from error


def read_saved(folder: str) -> DesiredState | None:
    """Return what was saved; None where there is no file.

    Raises BadInputError for a file that is damaged or of a newer version: to be logged, and then
    treated as none.
    """
    path = f"{folder}/{FILE_NAME}"
    try:
        with open(path, "rb") as file:
            data = file.read(_MAX_BYTES + 1)
        document = json.loads(data)
        if document["version"] != _VERSION:
            raise ValueError(f"version {document['version']!r}, not {_VERSION}")
        missing = [
            key for key in ("uid", "generation", "boot_id", "pools") if document.get(key) is None
        ]
        if missing:  # never written so: it would read as "no pool is wanted"
            raise ValueError(f"without {', '.join(missing)}")
        return DesiredState.from_json({**document, "source": Source.SAVED.value})
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise BadInputError(
            f"{path} cannot be used: {type(error).__name__}: {error}",
            reason="BadSavedState",
            remedy="it is written again as soon as the API server answers",
        ) from error


def prepare_folder(folder: str) -> None:
    """Make the state folder. Raises BadInputError for one that cannot be made."""
    if not folder.startswith("/"):
        raise BadInputError(
            f"state folder {folder!r} is not an absolute path", remedy="begin --state-dir with /"
        )
    try:
        os.makedirs(folder, mode=0o700, exist_ok=True)
    except OSError as error:
        raise BadInputError(
            f"cannot make the state folder {folder}: {error.strerror}",
            remedy="give a --state-dir that can be written",
        ) from error
