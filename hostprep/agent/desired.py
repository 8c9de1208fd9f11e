"""What this node was told to hold, kept on disk: the agent works on while the API server is away.

Only an instruction that the API server itself gave in this process's life releases memory: from
the file, and where the HostMemoryNode is gone, nothing is.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

from hostprep.agent.messages import Failure, Wanted
from hostprep.api.node_resource import PoolEntry, entries_of
from hostprep.api.pool_resource import spec_from_policy
from hostprep.errors import BadInputError, FailedError, HostprepError
from hostprep.linux.files import atomic_write, remove_file

__all__ = [
    "Desire",
    "Source",
    "key_of",
    "read_saved",
    "save",
    "scrubbed_on_claim",
    "wanted_of",
]

FILE_NAME = "desired.json"
_VERSION = 1
_MAX_BYTES = 16 << 20


class Source(Enum):
    """Where an instruction comes from."""

    NOTHING = "nothing"
    """There is none: no object, or not heard yet. Everything is kept as it is."""
    SAVED = "saved"
    """Read from the file while the API server was away."""
    LIVE = "live"
    """The object as the API server has it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Desire:
    """The entries of a HostMemoryNode, and what they came with."""

    source: Source = Source.NOTHING
    uid: str = ""
    generation: int = 0
    boot_id: str = ""
    """Of the boot in which it was saved."""
    entries: tuple[PoolEntry, ...] = ()

    @classmethod
    def of_object(cls, document: Mapping[str, Any], *, boot_id: str) -> Desire:
        """Return what a HostMemoryNode asks for. Raises BadInputError for one that is none."""
        try:
            metadata = document["metadata"]
            return cls(
                source=Source.LIVE,
                uid=str(metadata.get("uid") or ""),
                generation=int(metadata.get("generation") or 0),
                boot_id=boot_id,
                entries=_once_each(entries_of(document)),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise BadInputError(
                f"the HostMemoryNode cannot be read: {type(error).__name__}: {error}",
                reason="BadNode",
                remedy="delete it: the operator makes it anew, and memory is kept",
            ) from error

    def says_the_same_as(self, other: Desire) -> bool:
        """Whether saving the other one over this one would change nothing that matters."""
        return replace(self, source=other.source) == other


def _once_each(entries: Iterable[PoolEntry]) -> tuple[PoolEntry, ...]:
    names: dict[str, PoolEntry] = {}
    for entry in entries:
        names.setdefault(entry.name, entry)
    return tuple(names.values())


def key_of(entry: PoolEntry) -> str:
    """Return what tells one wording of an entry from another."""
    text = json.dumps(entry.to_json(), sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class Instruction:
    """What the worker is to do: pools to bring about, and entries that make no sense."""

    wanted: tuple[Wanted, ...] = ()
    refused: Mapping[str, Failure] = field(default_factory=dict)
    """By pool: left as they are."""
    withheld: frozenset[str] = frozenset()
    """Absent entries that are not carried out, since nobody confirmed them."""


def wanted_of(desire: Desire) -> Instruction:
    """Return what to do. Without an instruction: nothing at all."""
    if desire.source is Source.NOTHING:
        return Instruction()
    wanted: list[Wanted] = []
    refused: dict[str, Failure] = {}
    withheld: set[str] = set()
    for entry in desire.entries:
        if entry.absent and desire.source is not Source.LIVE:
            withheld.add(entry.name)
            continue
        try:
            spec = spec_from_policy(entry.name, entry.uid, entry.policy, entry.absent)
        except HostprepError as error:
            refused[entry.name] = Failure("BadPolicy", str(error))
        else:
            wanted.append(
                Wanted(
                    spec=spec,
                    key=key_of(entry),
                    leave_dirty=scrubbed_on_claim(entry),
                    at_boot=not entry.absent and entry.policy.get("boot") == "systemd",
                )
            )
    return Instruction(tuple(wanted), refused, frozenset(withheld))


def scrubbed_on_claim(entry: PoolEntry) -> bool:
    """Whether regions stay dirty until somebody wants them (`scrub.when: OnClaim`)."""
    scrub = entry.policy.get("scrub")
    return isinstance(scrub, Mapping) and scrub.get("when") == "OnClaim"


def save(folder: str, desire: Desire) -> None:
    """Write the entries, at once or not at all; with none the file goes. Raises FailedError."""
    try:
        _save(f"{folder}/{FILE_NAME}", desire)
    except HostprepError as error:
        raise FailedError(
            error.message,
            reason=error.reason,
            remedy="make room there, or give another --state-dir; until then a start without the"
            " API server begins from older entries, or none",
        ) from error


def _save(path: str, desire: Desire) -> None:
    if not desire.entries:
        remove_file(path)
        return
    document = {
        "version": _VERSION,
        "uid": desire.uid,
        "generation": desire.generation,
        "boot_id": desire.boot_id,
        "pools": [entry.to_json() for entry in desire.entries],
    }
    atomic_write(path, json.dumps(document, indent=1).encode(), mode=0o600)


def read_saved(folder: str) -> Desire | None:
    """Return what was saved; None where there is no file.

    Raises BadInputError for a file that is damaged or of a newer version: to be said, and then
    treated as none.
    """
    path = f"{folder}/{FILE_NAME}"
    try:
        with open(path, "rb") as file:
            data = file.read(_MAX_BYTES + 1)
        document = json.loads(data)
        if document["version"] != _VERSION:
            raise ValueError(f"version {document['version']!r}, not {_VERSION}")
        entries = _once_each(PoolEntry.from_json(item) for item in document["pools"])
        return Desire(
            source=Source.SAVED,
            uid=str(document["uid"]),
            generation=int(document["generation"]),
            boot_id=str(document["boot_id"]),
            entries=entries,
        )
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise BadInputError(
            f"{path} cannot be used: {type(error).__name__}: {error}",
            reason="BadSavedState",
            remedy="it is written anew as soon as the API server answers",
        ) from error


def prepare_folder(folder: str) -> None:
    """Make the state folder. Raises BadInputError for one that cannot be."""
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
