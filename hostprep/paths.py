"""Where everything of a pool lies: one folder a pool below the root."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

from hostprep.errors import BadInputError

DEFAULT_ROOT = "/run/hostprep"
TURNSTILE = "turnstile"
"""Folder below the root in which engines take turns registering."""
POOL_MARKS = ("claim.lock", "agent.json", "boot.json", "boot.ledger")
"""Any of these files makes a folder a pool's; no other folder is ever taken for one."""

DNS_LABEL = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?", re.ASCII)


def default_root() -> str:
    """Return the handoff's parent folder: HOSTPREP_ROOT, else /run/hostprep."""
    return os.environ.get("HOSTPREP_ROOT") or DEFAULT_ROOT


def check_pool_name(name: str, field: str = "") -> str:
    """Return the name if it can be a label, a folder and a resource name at once.

    Raises BadInputError otherwise, naming the field that it stands in, if one is told. Rule: a DNS
    label of RFC 1123, at most 63 characters, and not the name of a folder of ours.
    """
    where = f"{field}: " if field else ""
    if name == TURNSTILE:
        raise BadInputError(
            f"{where}a pool cannot be named {name}: engines take turns in a folder of that name",
            reason="BadPoolName",
            remedy="choose another name, such as kv",
        )
    if DNS_LABEL.fullmatch(name) is None:
        shown = name if len(name) <= 70 else name[:67] + "..."
        raise BadInputError(
            f"{where}pool name {shown!r} is not a DNS label",
            reason="BadPoolName",
            remedy="use at most 63 lower-case letters, digits and hyphens, such as kv-cache",
        )
    return name


def canonical_root(path: str) -> str:
    """Return the root as the kernel names it: links above it resolved, the root itself not.

    Mounts are found by their paths, and the kernel knows one only. A root that is itself a link
    stays one, and is refused by whoever opens it. Raises BadInputError for a relative path.
    """
    if not path.startswith("/"):
        raise BadInputError(
            f"root {path!r} is not an absolute path", reason="BadRoot", remedy="begin it with /"
        )
    folder, name = os.path.split(os.path.normpath(path))
    return os.path.join(os.path.realpath(folder), name) if name else "/"


@dataclass(frozen=True)
class PoolPaths:
    """The files of one pool. Engines may write below `tickets`, `state/*` and `links` only."""

    root: str
    pool: str

    @classmethod
    def of(cls, pool: str, root: str | None = None) -> PoolPaths:
        """Return a pool's checked paths, by default below HOSTPREP_ROOT. Raises BadInputError."""
        return cls(canonical_root(root or default_root()), check_pool_name(pool))

    @property
    def making(self) -> str:
        """Where the folder is made, so that it is a pool's from its first instant."""
        return f"{self.root}/.{self.pool}.new"

    @property
    def folder(self) -> str:
        """The pool's folder; mount this one, never a single file of it."""
        return f"{self.root}/{self.pool}"

    @property
    def mem(self) -> str:
        """Where the agent mounts hugetlbfs or tmpfs."""
        return f"{self.folder}/mem"

    @property
    def handoff(self) -> str:
        """The published file."""
        return f"{self.folder}/handoff.json"

    @property
    def claim_lock(self) -> str:
        """The pool-wide decision lock, held for try-locks only."""
        return f"{self.folder}/claim.lock"

    @property
    def tickets(self) -> str:
        """One file for each waiter, in order of arrival."""
        return f"{self.folder}/tickets"

    @property
    def state(self) -> str:
        """Beside the regions, since hugetlbfs has no extended attributes: a folder for each.

        A folder, and not files side by side: a device plugin can hand out one region's alone.
        """
        return f"{self.folder}/state"

    @property
    def links(self) -> str:
        """One symbolic link for each leased region that an engine finds by a path of its own."""
        return f"{self.folder}/links"

    @property
    def ledger(self) -> str:
        """The agent's own record: huge pages taken, boot, generation. Not for engines."""
        return f"{self.folder}/agent.json"

    @property
    def boot_ledger(self) -> str:
        """What the boot script set out to reserve, written ahead by it: see boot/2-reserve.sh."""
        return f"{self.folder}/boot.ledger"

    @property
    def devices(self) -> str:
        """What containers see that got regions as devices: a folder for each set of regions."""
        return f"{self.folder}/devices"

    def state_of(self, region: str) -> str:
        """Return the folder of a region's small files."""
        return f"{self.state}/{region}"

    def bad_mark(self, region: str) -> str:
        """Present once a page of the region was found bad: the region is to be rebuilt."""
        return f"{self.state_of(region)}/bad"

    def users_lock(self, region: str) -> str:
        """Held shared by every further process of the engine that leases the region."""
        return f"{self.state_of(region)}/users"

    def clean_mark(self, region: str) -> str:
        """Present only while the region is known to be all zeros. Absent means dirty."""
        return f"{self.state_of(region)}/clean"

    def sidecar(self, region: str) -> str:
        """Who holds, or last held, the region. Advisory, except for the lease's id."""
        return f"{self.state_of(region)}/lease"

    def warm_report(self, region: str) -> str:
        """Where the engine reports, for people, on the blocks that it keeps in the region."""
        return f"{self.state_of(region)}/warm"

    def kept_mark(self, region: str) -> str:
        """Since when the region is kept for its owner without a holder, as root first saw it."""
        return f"{self.state_of(region)}/kept"

    def board(self, region: str) -> str:
        """Where the ranks of the engine that leases the region report how far they are."""
        return f"{self.state_of(region)}/board"

    def part_of(self, mount_dir: str, region: str) -> str:
        """Where a region is made: its temporary name, which no handoff ever holds."""
        return f"{self.folder}/{mount_dir}/.{region}.part"

    def region_of(self, relative: str) -> str:
        """Return the absolute path of a handoff's relative one."""
        return f"{self.folder}/{relative}"


def held_name(region: str, inode: int) -> str:
    """Return the name that a removed region's file has while processes still use its pages."""
    return f".{region}.{inode}.held"


def region_of_held(name: str) -> str | None:
    """Return the region of a file of such a name; None for any other name."""
    region, _, inode = name[1 : -len(".held")].rpartition(".")
    is_held = name.startswith(".") and name.endswith(".held") and inode.isdecimal()
    return region if is_held else None
