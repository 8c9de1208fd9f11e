"""The functions of `hostprep` that engines call."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence

from hostprep.client.attachment import Attachment
from hostprep.client.claim import claim
from hostprep.client.environment import LeaseEnvironment
from hostprep.client.handoff import Handoff, Region
from hostprep.client.handoff_reader import read_handoff
from hostprep.client.lease import Lease, join_lease, open_users_lock
from hostprep.client.owner import Owner
from hostprep.client.request import Request
from hostprep.client.sidecar import is_clean
from hostprep.client.verify import check_region, open_region, verify_handoff
from hostprep.errors import HostprepError, NotReadyError
from hostprep.linux.files import closing_fd
from hostprep.linux.locks import try_lock
from hostprep.paths import PoolPaths, canonical_root, check_pool_name, default_root

__all__ = ["attach", "attach_many", "join", "wait"]

_PAUSE_S = 0.05


def attach(
    pool: str,
    *,
    size_bytes: int = 1,
    numa_node: int | None = None,
    region: str | None = None,
    owner: Owner | None = None,
    wait_timeout_s: float = 0.0,
    read_only: bool = False,
    root: str | None = None,
) -> Attachment:
    """Claim one region that fits and map it, every page present. Use as a context manager.

    `size_bytes` is the least that will do, `numa_node` where (interleaved regions serve any),
    `region` takes a certain one. With `owner` the region's earlier bytes come back if they are
    this owner's and of the same content; otherwise the region is all zeros. With `read_only`
    a named region is mapped beside its writer, without a lease, and kept from being scrubbed.

    Raises NotReadyError (no memory verified for this boot), BusyError (others hold it and the
    wait is over), BadInputError, FailedError: all HostprepError, with `reason` and `remedy`.
    """
    paths = _paths(pool, root)
    if read_only:
        return _attach_read_only(paths, region)
    names = (region,) if region else ()
    request = Request(size_bytes=size_bytes, numa_node=numa_node, names=names, owner=owner)
    (lease,) = claim(paths, request, wait_timeout_s=wait_timeout_s)
    return Attachment(lease)


def attach_many(
    pool: str,
    *,
    count: int = 1,
    size_bytes: int = 1,
    numa_node: int | None = None,
    regions: Sequence[str] = (),
    owner: Owner | None = None,
    wait_timeout_s: float = 0.0,
    root: str | None = None,
) -> list[Attachment]:
    """Claim `count` regions (or the named ones) in one step: all of them, or none.

    For tensor-parallel groups: one process takes them all, the ranks join by name
    (`join(pool, lease_id=..., region=...)`) or by descriptor. Raises as `attach` does.
    """
    request = Request(
        count=count, size_bytes=size_bytes, numa_node=numa_node, names=tuple(regions), owner=owner
    )
    leases = claim(_paths(pool, root), request, wait_timeout_s=wait_timeout_s)
    attachments: list[Attachment] = []
    try:
        for lease in leases:
            attachments.append(Attachment(lease))
    except BaseException:
        for attachment in attachments:
            attachment.close()
        for lease in leases[len(attachments) + 1 :]:
            lease.close()
        raise
    return attachments


def join(
    pool: str | None = None,
    *,
    lease_id: str | None = None,
    region: str | None = None,
    fd: int | None = None,
    root: str | None = None,
) -> Attachment:
    """Map a region that another process of the same engine leads the lease of.

    With neither `lease_id` nor `fd`, the lease of the surrounding `hostprep exec` is joined.
    `fd` is a descriptor received from the leader (inherited, or by SCM_RIGHTS): it is taken
    over, and is the lease. By name, the region stays with this process even when the leader
    ends first. Raises NotReadyError where the lease does not live any more.
    """
    if lease_id is None and fd is None:
        given = LeaseEnvironment.read()
        pool, lease_id, root = given.pool, given.lease_id, root or given.root
        region = region or given.regions[0]
    paths = _paths(pool or "", root)
    handoff = read_handoff(paths)
    if fd is not None:
        return Attachment(_adopt_descriptor(paths, handoff, fd, lease_id or ""))
    chosen = handoff.region(region or (handoff.regions[0].name if handoff.regions else ""))
    if chosen is None:
        raise NotReadyError(f"pool {paths.pool} has no region {region}", reason="NoSuchRegion")
    return Attachment(join_lease(paths, handoff, chosen, lease_id or ""))


def wait(
    pool: str,
    *,
    timeout_s: float,
    size_bytes: int = 1,
    count: int = 1,
    handoff_only: bool = False,
    on_wait: Callable[[NotReadyError], None] | None = None,
    root: str | None = None,
) -> Handoff:
    """Return the handoff once `count` regions of `size_bytes` are verified for this boot.

    For start-up ordering: it claims nothing, and a region that is leased counts. With
    `handoff_only` the agent's word is taken, published for this boot, and no region opened: for
    an init container with user namespaces, whose rights do not reach the regions before a mount
    of their own. `on_wait` is told what is waited for, whenever that changes. Raises the reason
    for the last refusal (NotReadyError) after `timeout_s` seconds.
    """
    paths = _paths(pool, root)
    request = Request(count=count, size_bytes=size_bytes)
    deadline_s = time.monotonic() + timeout_s
    told = ""
    while True:
        try:
            return _ready(paths, request, handoff_only=handoff_only)
        except NotReadyError as error:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                raise
            if on_wait is not None and error.message != told:
                told = error.message
                on_wait(error)
            time.sleep(min(_PAUSE_S, left_s))


def _ready(paths: PoolPaths, request: Request, *, handoff_only: bool) -> Handoff:
    handoff = read_handoff(paths)
    request.candidates(handoff)
    for _, problem in () if handoff_only else verify_handoff(paths, handoff):
        if problem is not None:
            raise problem
    return handoff


def _paths(pool: str, root: str | None) -> PoolPaths:
    return PoolPaths(canonical_root(root or default_root()), check_pool_name(pool))


def _adopt_descriptor(paths: PoolPaths, handoff: Handoff, fd: int, lease_id: str) -> Lease:
    status = os.fstat(fd)
    for region in handoff.regions:
        if (region.st_dev, region.st_ino) == (status.st_dev, status.st_ino):
            check_region(region, fd)
            os.set_inheritable(fd, False)
            return Lease(paths, handoff, region, fd, lease_id, contents_kept=True, is_leader=False)
    raise NotReadyError(
        f"descriptor {fd} is of no region of pool {paths.pool}", reason="NoSuchRegion"
    )


def _attach_read_only(paths: PoolPaths, name: str | None) -> Attachment:
    handoff = read_handoff(paths)
    region = handoff.region(name or "")
    if region is None:
        raise NotReadyError(
            f"pool {paths.pool} has no region {name!r}",
            reason="NoSuchRegion",
            remedy="name the region to read: " + ", ".join(r.name for r in handoff.regions),
        )
    users = open_users_lock(paths, region)
    try:
        if not try_lock(users, exclusive=False):
            raise NotReadyError(f"region {region.name} is being scrubbed", reason="Busy")
        fd = open_region(paths, region, writable=False)
        try:
            check_region(region, fd)
            _check_readable(paths, region)
        except HostprepError:
            os.close(fd)
            raise
    except BaseException:
        os.close(users)
        raise
    lease = Lease(
        paths, handoff, region, fd, "", contents_kept=True, users_fd=users, is_leader=False
    )
    return Attachment(lease, writable=False)


def _check_readable(paths: PoolPaths, region: Region) -> None:
    """Refuse what nobody leases and nobody scrubbed: the bytes of an owner who is gone."""
    with closing_fd(open_region(paths, region, writable=False)) as probe:
        if try_lock(probe, exclusive=False) and not is_clean(paths, region):
            raise NotReadyError(
                f"region {region.name} has no writer, and is not clean",
                reason="Dirty",
                remedy="read it while its writer lives, or after it was scrubbed",
            )
