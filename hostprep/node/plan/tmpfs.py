"""Whether regions can be had as files of tmpfs, in huge or in base pages."""

from __future__ import annotations

from dataclasses import replace

from hostprep.backing import Backing
from hostprep.node.plan.capacity import Budget
from hostprep.node.plan.question import Offer, Question, Refusal
from hostprep.node.plan.words import movable_refusal, short_refusal
from hostprep.units import format_bytes

__all__ = ["pins_with_noswap", "take_tmpfs", "takes_large_folios"]

_THP_SPARE = 1.05
"""Of what a node needs, so much must lie in blocks of 2 MiB, for others take some meanwhile."""


def take_tmpfs(question: Question, offer: Offer, backing: Backing) -> Offer | Refusal:
    """Return the offer with the new regions of this backing taken, or why they cannot be."""
    page = _page_bytes(question, backing)
    pages = offer.changes.pages_per_node(backing, page, question.layout.node_ids)
    total = offer.changes.new_bytes(backing)
    refusal = (
        _pinning(question, backing)
        or _rights(question, backing)
        or movable_refusal(question, pages, backing)
        or _room(question, offer.budget, total, backing)
    )
    if refusal is not None:
        return refusal
    budget = offer.budget
    for node_id, count in pages.items():
        refusal = _node(budget, node_id, count * page, backing)
        if refusal is not None:
            return refusal
        take = budget.without_blocks if backing is Backing.THP else budget.without_base
        budget = take(node_id, count * page)
    own_mount = question.facts.process.can_mount
    return replace(
        offer,
        budget=budget.charged(tmpfs_bytes=total, root_bytes=0 if own_mount else total),
        notes=offer.notes if own_mount else (*offer.notes, _WITHOUT_ROOT),
        own_mount=own_mount,
    )


_WITHOUT_ROOT = (
    "without the right to mount, the root's own tmpfs is used; as root there would be huge pages, "
    "noswap and mounts of the pool's own"
)


def takes_large_folios(question: Question, backing: Backing) -> bool:
    """Tell whether base-page regions can be allocated in larger folios without any stall.

    Since Linux 6.14 fallocate on a tmpfs that is mounted for it takes folios of whatever order
    is free, with no compaction unless defrag says always: fewer of them to allocate, to zero one
    by one and to map. Fragmented memory costs it nothing but the gain.
    """
    facts = question.facts
    return (
        backing is Backing.BASE
        and facts.process.can_mount
        and facts.kernel.has_tmpfs_large_folios
        and facts.thp.shmem_enabled not in ("", "unknown", "deny")
        and facts.thp.defrag != "always"
    )


def pins_with_noswap(question: Question) -> bool:
    """Return whether a tmpfs mount gets the option noswap."""
    return question.facts.kernel.has_tmpfs_noswap and question.facts.process.can_mount


def _page_bytes(question: Question, backing: Backing) -> int:
    return backing.page_bytes if backing is Backing.THP else question.facts.memory.page_bytes


def _pinning(question: Question, backing: Backing) -> Refusal | None:
    if pins_with_noswap(question) or question.facts.memory.swap_total_bytes == 0:
        return None
    if question.facts.kernel.has_tmpfs_noswap:
        return Refusal(
            backing,
            "swap is on, and tmpfs cannot be kept out of it without the right to mount",
            "run it as root, or turn swap off (swapoff -a)",
            "NotPinned",
        )
    return Refusal(
        backing,
        "swap is on, and this kernel's tmpfs has no noswap (Linux 6.4)",
        "turn swap off (swapoff -a), use HugeTLB2Mi, or a newer kernel",
        "NotPinned",
    )


def _rights(question: Question, backing: Backing) -> Refusal | None:
    process, root, thp = question.facts.process, question.facts.root, question.facts.thp
    if backing is Backing.THP:
        if not process.can_mount:
            why = "a tmpfs with huge=always must be mounted"
            return Refusal(backing, why, "run it as root", "NeedsRoot")
        if not thp.shmem_enabled or thp.shmem_enabled == "deny":
            state = "denies" if thp.shmem_enabled else "has no"
            return Refusal(
                backing,
                f"this kernel {state} transparent huge pages for tmpfs",
                "write never to /sys/kernel/mm/transparent_hugepage/shmem_enabled"
                if thp.shmem_enabled
                else "choose another backing",
                "NoSuchPages",
            )
    elif not process.can_mount and (root.fs_type != "tmpfs" or not root.writable):
        state = "is not writable" if root.fs_type == "tmpfs" else f"is {root.fs_type}, not tmpfs"
        return Refusal(
            backing,
            f"mounts need root, and {root.path} {state}",
            "run it as root, or give --root a folder of your own below /dev/shm",
            "NeedsRoot",
        )
    return None


def _room(question: Question, budget: Budget, total: int, backing: Backing) -> Refusal | None:
    """Return that the root's tmpfs is too small, or that our own cgroup's limit is."""
    if not question.facts.process.can_mount and budget.root_free_bytes < total:
        return Refusal(
            backing,
            f"{question.facts.root.path} has {format_bytes(max(0, budget.root_free_bytes))} free "
            f"of the {format_bytes(total)} needed",
            "give --root another tmpfs, or run it as root",
            "NotEnoughMemory",
            less_would_do=True,
        )
    limit = budget.tmpfs_limit_bytes
    if limit is not None and limit < total:
        return Refusal(
            backing,
            f"this process's cgroup is limited to {format_bytes(max(0, limit))} of memory, and "
            f"{format_bytes(total)} are needed",
            "or run it where a host-level cgroup can be made",
            "NotEnoughMemory",
            less_would_do=True,
        )
    return None


def _node(budget: Budget, node_id: int, size: int, backing: Backing) -> Refusal | None:
    spendable = budget.spendable_bytes(node_id)
    if spendable < size:
        return short_refusal(backing, node_id, size, spendable, "a tmpfs")
    contiguous = budget.nodes[node_id].contiguous_bytes
    if backing is Backing.THP and contiguous < size * _THP_SPARE:
        return Refusal(
            backing,
            f"node {node_id} is fragmented: only {format_bytes(contiguous)} free in blocks of "
            f"2 MiB or more, {format_bytes(int(size * _THP_SPARE))} wanted; "
            "nothing is fought with faults",
            "prepare at boot (hostprep boot), before memory is used",
            "Fragmented",
            node_id,
        )
    return None
