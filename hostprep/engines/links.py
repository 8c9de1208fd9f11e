"""Symbolic links that lead an engine to its leased regions, and are harmless after the lease.

Two steps: the engine's path leads to `links/REGION@LEASE` in the pool's folder, and that to the
file. The next claim of the region removes the second one, which leaves the first harmless
wherever it is, also in mount namespaces that no other process sees.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from dataclasses import replace

from hostprep.client.claim import claim_lock
from hostprep.client.lease import Lease
from hostprep.client.sidecar import read_sidecar, write_sidecar
from hostprep.errors import BadInputError, FailedError, HostprepError
from hostprep.linux.files import closing_fd, from_os_error, open_state_file
from hostprep.linux.locks import try_lock
from hostprep.paths import PoolPaths

_CHOOSE = "choose another path for --link, or remove it"
_LEFT = "it may be a dead engine's: remove it, or leave the engine's own name out"


def check_template(paths: PoolPaths, template: str, count: int) -> None:
    """Refuse, before anything is claimed, what could not be linked. Raises BadInputError.

    Names that depend on the lease are checked when the lease is there.
    """
    try:
        names = {_fill(template, "pool", "lease", f"r{index}", index) for index in range(count)}
    except (AttributeError, LookupError, ValueError) as error:
        raise BadInputError(
            f"link {template!r} has an unknown field",
            reason="BadLink",
            remedy="the fields are {pool}, {lease}, {region} and {index}",
        ) from error
    if len(names) < count:
        raise BadInputError(
            f"link {template!r} would be the same for all {count} regions",
            reason="BadLink",
            remedy="put {index} or {region} into it",
        )
    if "{lease}" not in template and "{region}" not in template:
        for index in range(count):
            _check_free(paths.root, _fill(template, paths.pool, "", "", index), _CHOOSE)


def check_paths(root: str, paths: Sequence[str]) -> None:
    """Refuse, before anything is claimed, paths of an engine that are taken.

    Raises BadInputError. A link of an earlier lease of ours may be replaced.
    """
    for path in paths:
        _check_free(root, path, _LEFT)


def link_regions(leases: Sequence[Lease], template: str) -> None:
    """Link every leased region at its path; none is left on an error.

    Raises BadInputError where something that is not ours is in the way.
    """
    places = [
        (lease, _fill(template, lease.handoff.pool, lease.lease_id, lease.region.name, index))
        for index, lease in enumerate(leases)
    ]
    _link_all(places, _CHOOSE)


def link_at(leases: Sequence[Lease], places: Sequence[tuple[str, int]]) -> None:
    """Make an engine's own links: a path, and the index of the lease it leads to.

    Raises BadInputError as `link_regions` does, FailedError where the engine could not follow
    one (fs.protected_symlinks); none is left then.
    """
    _link_all([(leases[index], path) for path, index in places], _LEFT)


def _link_all(wanted: Sequence[tuple[Lease, str]], remedy: str) -> None:
    made: list[str] = []
    try:
        for lease, path in wanted:
            _link(lease, path, remedy)
            made.append(path)
            _check_leads(lease, path)
    except BaseException:
        for path in made:
            with contextlib.suppress(OSError):
                os.unlink(path)
        raise


def _check_leads(lease: Lease, path: str) -> None:
    """Follow a link that was made, as the engine will. Raises FailedError where it cannot be."""
    try:
        found, leased = os.stat(path), os.fstat(lease.fd)
    except OSError as error:
        raise FailedError(
            f"the link {path} cannot be followed: {error.strerror}",
            reason="BadLink",
            remedy="with fs.protected_symlinks a link in a sticky folder such as /dev/shm serves "
            "its maker alone: make it as the user who follows it",
        ) from error
    if (found.st_dev, found.st_ino) != (leased.st_dev, leased.st_ino):
        raise FailedError(
            f"the link {path} leads elsewhere", reason="BadLink", remedy="see who else links there"
        )


def _fill(template: str, pool: str, lease: str, region: str, index: int) -> str:
    return os.path.abspath(template.format(pool=pool, lease=lease, region=region, index=index))


def _link(lease: Lease, path: str, remedy: str) -> None:
    inner = f"{lease.paths.links}/{lease.region.name}@{lease.lease_id}"
    _check_free(lease.paths.root, path, remedy)
    sidecar = read_sidecar(lease.paths, lease.region.name)
    try:
        with contextlib.suppress(FileExistsError):
            os.symlink(f"../{lease.region.path}", inner)
        if sidecar is not None:
            # Recorded before it exists: a crash in between leaves a name to look at, no link.
            recorded = replace(sidecar, links=(*sidecar.links, path))
            gid = os.fstat(lease.fd).st_gid
            write_sidecar(lease.paths, lease.region.name, recorded, gid=gid)
        if os.path.lexists(path):
            os.unlink(path)  # a stale one of ours: _check_free saw to it
        os.symlink(inner, path)
    except OSError as error:
        raise from_os_error(error, f"link {path}") from error


def _check_free(root: str, path: str, remedy: str) -> None:
    """Allow a free path, and a link of ours that leads nowhere or to an unleased region."""
    if not os.path.lexists(path):
        return
    ours = os.path.islink(path) and os.readlink(path).startswith(f"{root}/")
    if ours and not _leads_to_lease(root, path):
        return
    raise BadInputError(
        f"{path} exists" + (" and leads to a region that is leased" if ours else ""),
        reason="BadLink",
        remedy=remedy,
    )


def _leads_to_lease(root: str, path: str) -> bool:
    """Tell whether the link leads to a leased region; True where that cannot be found out.

    A container that was killed finds its own link when it is restarted, and that leads to its
    region until the next claim or the agent's scrub.
    """
    target = os.path.realpath(path)
    if not os.path.lexists(target):
        return False
    name = os.path.relpath(target, os.path.realpath(root)).split("/")[0]
    pool = PoolPaths(root, name)
    try:
        # Trying a lock takes it for an instant: without this one a claimer would see a lease.
        with claim_lock(pool), closing_fd(open_state_file(target, os.O_RDONLY)) as fd:
            return not try_lock(fd, exclusive=False)
    except FileNotFoundError:
        return False
    except (HostprepError, OSError):
        return True
