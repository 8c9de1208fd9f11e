"""What engines call: attach, attach_many, join, wait; and a leased region, mapped."""

from __future__ import annotations

import builtins
import mmap
import os
import sys
import time
import weakref
from collections.abc import Callable, Sequence
from types import TracebackType

from hostprep.client.claim import claim
from hostprep.client.environment import LeaseEnvironment
from hostprep.client.handoff import (
    Handoff,
    Region,
    check_region,
    open_region,
    read_handoff,
    verify_handoff,
)
from hostprep.client.lease import Lease, Request, join_lease, open_users_lock
from hostprep.client.owner import Owner
from hostprep.client.sidecar import is_clean
from hostprep.errors import HostprepError, NotReadyError
from hostprep.linux.files import closing_fd
from hostprep.linux.locks import try_lock
from hostprep.linux.memory import address_of, explain, map_shared, populate
from hostprep.paths import PoolPaths

TYPE_CHECKING = False
if TYPE_CHECKING:
    from hostprep.linux.threads import Stop

_PIECE_BYTES = 64 << 20

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

    `size_bytes` is the least size, `numa_node` where (interleaved regions serve any), `region`
    names one. With `owner` the region's earlier bytes come back if they are
    this owner's and of the same content; otherwise the region is all zeros. With `read_only`
    a named region is mapped beside its writer, without a lease, and kept from being scrubbed.

    Raises NotReadyError (no memory verified for this boot), BusyError (others hold it and the
    wait is over), BadInputError, FailedError: all HostprepError, with `reason` and `remedy`.
    """
    paths = PoolPaths.of(pool, root)
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
    leases = claim(PoolPaths.of(pool, root), request, wait_timeout_s=wait_timeout_s)
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
        surrounding = LeaseEnvironment.read()
        pool, lease_id = surrounding.pool, surrounding.lease_id
        root, region = root or surrounding.root, region or surrounding.regions[0]
    paths = PoolPaths.of(pool or "", root)
    handoff = read_handoff(paths)
    if fd is not None:
        return Attachment(_adopt_descriptor(paths, handoff, fd, lease_id or ""))
    chosen = handoff.region(region or (handoff.regions[0].name if handoff.regions else ""))
    if chosen is None:
        raise NotReadyError(f"pool {paths.pool} has no region {region}", reason="NoSuchRegion")
    return Attachment(join_lease(paths, handoff, chosen, lease_id or ""))


def join_end(size_bytes: int, *, region: str) -> memoryview:
    """Map the last `size_bytes` of a region of the surrounding `hostprep exec`, and no more.

    For what a scheduler keeps in a region whose slots other processes copy. The mapping, and with
    it this process's share of the lease, lasts as long as any view of it. Raises as `join` does.
    """
    lease = LeaseEnvironment.read()
    paths = PoolPaths.of(lease.pool, lease.root)
    handoff = read_handoff(paths)
    chosen = handoff.region(region)
    if chosen is None:
        raise NotReadyError(f"pool {paths.pool} has no region {region}", reason="NoSuchRegion")
    joined = join_lease(paths, handoff, chosen, lease.lease_id)
    try:
        begin = (chosen.size_bytes - size_bytes) // chosen.page_bytes * chosen.page_bytes
        mapping = map_shared(joined.fd, chosen.size_bytes - begin, offset_bytes=begin)
    except BaseException:
        joined.retire()
        joined.close()
        raise
    _keep(mapping, joined)
    return memoryview(mapping)[-size_bytes:]


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
    `handoff_only` the handoff, published for this boot, is trusted and no region opened: for an
    init container with user namespaces, whose rights do not reach the regions before a mount of
    their own. `on_wait` gets the reason for waiting, whenever it changes. Raises the last reason
    (NotReadyError) after `timeout_s` seconds.
    """
    paths = PoolPaths.of(pool, root)
    request = Request(count=count, size_bytes=size_bytes)
    deadline_s = time.monotonic() + timeout_s
    reported = ""
    while True:
        try:
            return _ready(paths, request, handoff_only=handoff_only)
        except NotReadyError as error:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                raise
            if on_wait is not None and error.message != reported:
                reported = error.message
                on_wait(error)
            time.sleep(min(_PAUSE_S, left_s))


class Attachment:
    """A region's memory in this process; use it as a context manager.

    `buffer` is a flat memoryview of bytes (numpy.frombuffer and torch.frombuffer take it as it
    is), `address` its address for ctypes. The lease lasts as long as the mapping or any
    descriptor of it: views that outlive `close()` keep both, and are never left dangling.
    """

    def __init__(self, lease: Lease, *, writable: bool = True) -> None:
        """Map the lease's region with every page present. Takes the lease over, errors included."""
        self._lease = lease
        try:
            mapping = map_shared(lease.fd, lease.region.size_bytes, writable=writable)
            self.address = address_of(mapping)
            """Where the region is mapped, page-aligned."""
            make_present(lease.region, self.address, lease.region.size_bytes)
        except BaseException:
            lease.retire()
            lease.close()
            raise
        self._buffer: memoryview | None = memoryview(mapping)
        _keep(mapping, lease)

    @property
    def buffer(self) -> memoryview:
        """The region's bytes, in place. Raises ValueError after `close()`."""
        if self._buffer is None:
            raise ValueError("the attachment is closed")
        return self._buffer

    @property
    def size_bytes(self) -> int:
        """Size of the whole region; at least the requested size."""
        return self._lease.region.size_bytes

    @property
    def page_bytes(self) -> int:
        """Size of the pages behind it."""
        return self._lease.region.page_bytes

    @property
    def numa_node(self) -> int | None:
        """The NUMA node that holds all of it; None if it is interleaved."""
        return self._lease.region.numa_node

    @property
    def generation(self) -> int:
        """The handoff's generation that this rests on."""
        return self._lease.handoff.generation

    @property
    def handoff(self) -> Handoff:
        """The handoff that this rests on."""
        return self._lease.handoff

    @property
    def region(self) -> Region:
        """The region as published, with the agent's advice for registering."""
        return self._lease.region

    @property
    def path(self) -> str:
        """Absolute path of the region's file."""
        return self._lease.path

    @property
    def lease_id(self) -> str:
        """Give it to the engine's other processes: `hostprep.join(pool, lease_id=...)`."""
        return self._lease.lease_id

    @property
    def is_leader(self) -> bool:
        """Whether this process leads the lease: it neither joined it nor only reads."""
        return self._lease.is_leader

    @property
    def fd(self) -> int:
        """The leased descriptor. A process that holds a duplicate holds the lease."""
        return self._lease.fd

    @property
    def contents_kept(self) -> bool:
        """True where the owner's earlier bytes are here; otherwise the region is all zeros."""
        return self._lease.contents_kept

    @property
    def discarded(self) -> str | None:
        """Why the owner's earlier bytes were not given back."""
        return self._lease.discarded

    @property
    def zeroed_s(self) -> float:
        """Seconds that the claim spent on zeroing what the last owner left; 0 for a clean region.

        Attaching took them too; the agent, or `hostprep prepare`, spends them beforehand.
        """
        return self._lease.zeroed_s

    @property
    def warnings(self) -> tuple[str, ...]:
        """Known issues of registering this memory with CUDA, worst first.

        A sentence each, with the remedy; of this kernel, its zones, the NVIDIA driver and this
        process's limits, for calls of the size that `region.attach` advises. Observed at each
        access, not by attaching. Empty where none is known, or no driver can be seen.
        """
        from hostprep.known_issues import issues_of

        return tuple(
            f"{issue.what}; {issue.remedy}"
            for issue in issues_of(self.region)
            if issue.severity != "info"
        )

    def close(self) -> None:
        """Release the memory: unmapped, and the lease ended, as soon as no object uses it.

        Views keep it, and so do objects that only refer to the buffer (torch.frombuffer holds on
        to it in no other way): nothing is ever unmapped under them.
        """
        self._buffer = None

    def __enter__(self) -> Attachment:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._buffer is None else f"at {self.address:#x}"
        return f"<Attachment {self._lease.handoff.pool}/{self.region.name} {state}>"


_alive: dict[int, weakref.ref[mmap.mmap]] = {}
_orphans: list[object] = []


def _keep(mapping: mmap.mmap, lease: Lease) -> None:
    """End the lease when the mapping is gone: when its last user has released it."""
    key = id(mapping)
    names, is_finalizing = vars(builtins), sys.is_finalizing

    def unmapped(_: object) -> None:
        if is_finalizing() and not names.get("open"):
            # The interpreter's very end, which some extensions' objects outlive: no file can be
            # read or written any more, and the end of the process is as good as `retire`.
            return
        _alive.pop(key, None)
        lease.retire()
        lease.close()

    _alive[key] = weakref.ref(mapping, unmapped)


def _after_fork() -> None:
    """In a forked child, where the ranges are not mapped (MADV_DONTFORK): never unmap them.

    The child may have mapped something else there since. It keeps the objects for good, and does
    not touch its parent's leases.
    """
    _orphans.extend(mapping for ref in _alive.values() if (mapping := ref()) is not None)
    _alive.clear()


os.register_at_fork(after_in_child=_after_fork)


def make_present(
    region: Region, address: int, size_bytes: int, *, stop: Stop | None = None
) -> None:
    """Build this process's page tables: at once for huge pages, by threads for base ones.

    `address` and `size_bytes` are of the region's mapping, or of a part of it. Reading populates
    2.5 times faster than writing, and the entries of a shared mapping are writable all the same
    (research: memory, section 4.4). Raises HostprepError; `Stopped` if `stop` was
    set before base pages were all present: it is checked every 64 MiB.
    """

    def read(offset: int, length: int) -> None:
        populate(address + offset, length, write=False)

    from hostprep.linux.threads import run_pieces

    try:
        if region.page_bytes > os.sysconf("SC_PAGE_SIZE"):
            read(0, size_bytes)
            return
        run_pieces(
            read,
            size_bytes=size_bytes,
            piece_bytes=_PIECE_BYTES,
            threads=min(region.attach.populate_read_threads, len(os.sched_getaffinity(0))),
            stop=stop,
        )
    except OSError as error:
        raise explain(error.errno, f"attaching to {region.name}") from error


def _ready(paths: PoolPaths, request: Request, *, handoff_only: bool) -> Handoff:
    handoff = read_handoff(paths)
    request.candidates(handoff)
    for _, problem in () if handoff_only else verify_handoff(paths, handoff):
        if problem is not None:
            raise problem
    return handoff


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
    """Refuse a region that is neither leased nor scrubbed: an earlier owner's bytes."""
    with closing_fd(open_region(paths, region, writable=False)) as probe:
        if try_lock(probe, exclusive=False) and not is_clean(paths, region):
            raise NotReadyError(
                f"region {region.name} has no writer, and is not clean",
                reason="Dirty",
                remedy="read it while its writer lives, or after it was scrubbed",
            )
