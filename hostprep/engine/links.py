"""Putting a leased region where an engine looks for it: a symbolic link that dies with the lease.

Two steps: the engine's path leads to `links/REGION@LEASE` in the pool's folder, and that to the
file. The next claim of the region removes the second one, which leaves the first harmless
wherever it is, also in mount namespaces that nobody else sees.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence

from hostprep.claim import Lease
from hostprep.claim.claims import claim_lock
from hostprep.claim.sidecar import read_sidecar, write_sidecar
from hostprep.errors import BadInputError, HostprepError
from hostprep.kernel.files import closing_fd, from_os_error, open_state_file
from hostprep.kernel.locks import try_lock
from hostprep.paths import PoolPaths
from hostprep.values import replace

__all__ = ["check_template", "link_regions"]


def check_template(paths: PoolPaths, template: str, count: int) -> None:
    """Refuse, before anything is claimed, what could not be linked. Raises BadInputError.

    Names that depend on the lease are not known yet, and are looked at when they are.
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
            _check_free(paths.root, _fill(template, paths.pool, "", "", index))


def link_regions(leases: Sequence[Lease], template: str) -> tuple[str, ...]:
    """Link every leased region at its path. Returns the paths; none is left on an error.

    Raises BadInputError where something of somebody else's is in the way.
    """
    made: list[str] = []
    try:
        for index, lease in enumerate(leases):
            path = _fill(template, lease.handoff.pool, lease.lease_id, lease.region.name, index)
            _link(lease, path)
            made.append(path)
    except BaseException:
        for path in made:
            with contextlib.suppress(OSError):
                os.unlink(path)
        raise
    return tuple(made)


def _fill(template: str, pool: str, lease: str, region: str, index: int) -> str:
    return os.path.abspath(template.format(pool=pool, lease=lease, region=region, index=index))


def _link(lease: Lease, path: str) -> None:
    inner = f"{lease.paths.links}/{lease.region.name}@{lease.lease_id}"
    _check_free(lease.paths.root, path)
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


def _check_free(root: str, path: str) -> None:
    """Allow an empty place, and a link of ours that leads nowhere, or to what nobody leases."""
    if not os.path.lexists(path):
        return
    ours = os.path.islink(path) and os.readlink(path).startswith(f"{root}/")
    if ours and not _leads_to_lease(root, path):
        return
    raise BadInputError(
        f"{path} exists" + (" and leads to a region that is leased" if ours else ""),
        reason="BadLink",
        remedy="choose another path for --link, or remove it",
    )


def _leads_to_lease(root: str, path: str) -> bool:
    """Tell whether somebody leases what the link leads to; True where that cannot be told.

    A container that was killed finds its own link again when it is started anew, and that leads
    to its region until the next claim or the agent's scrub.
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
