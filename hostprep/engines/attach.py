"""`hostprep attach`: try an attach on this node, and print what it and registering take."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from hostprep.client.attach import attach_many
from hostprep.client.handoff import Region
from hostprep.cuda.cost import registration_cost
from hostprep.known_issues import driver_text, issues_of
from hostprep.units import format_bytes, format_seconds


def run_attach(options: argparse.Namespace) -> int:
    """Attach as an engine does, print what it took, and let go. Returns 0.

    Prints also what registering with CUDA takes here, and its known issues, where there is a
    driver. Raises HostprepError as `attach_many` does.
    """
    begin_s = time.perf_counter()
    attachments = attach_many(
        options.pool,
        count=options.count,
        size_bytes=options.size_bytes,
        numa_node=options.numa_node,
        regions=options.region,
        wait_timeout_s=options.wait,
        root=options.root,
    )
    took_s = time.perf_counter() - begin_s
    for attachment in attachments:
        region = attachment.region
        if options.output == "table":
            print(
                f"{region.name}: {format_bytes(region.size_bytes)} of {region.backing.value}, "
                f"{region.placement}, at {attachment.address:#x}"
            )
        attachment.close()
    zeroed_s = sum(attachment.zeroed_s for attachment in attachments)
    registering = _registering([attachment.region for attachment in attachments])
    if options.output == "json":
        answer = {
            "regions": [attachment.region.name for attachment in attachments],
            "size_bytes": sum(attachment.size_bytes for attachment in attachments),
            "attach_s": took_s,
            "zeroed_s": zeroed_s,
            "registering": registering,
        }
        print(json.dumps(answer))
    else:
        print(f"attached in {format_seconds(took_s)}, every page present")
        if zeroed_s:
            zeroed = format_seconds(zeroed_s)
            print(f"  {zeroed} of it to zero what the last owner left; the agent, or")
            print("  `hostprep prepare`, does that beforehand")
        for line in _registering_lines(registering) if registering else ():
            print(line)
    return 0


def _registering(regions: Sequence[Region]) -> dict[str, Any] | None:
    """Return cost and known issues of one process that registers all of these regions.

    None where nothing is registered: no NVIDIA driver can be seen from here, or its GPUs use the
    host's page tables. Sizes in bytes; estimated, not measured (hostprep.register.cost).
    """
    words = driver_text()
    if words is None or not regions or all(region.attach.skip_register for region in regions):
        return None
    cost = registration_cost(
        sum(region.size_bytes for region in regions),
        page_bytes=min(region.page_bytes for region in regions),
        driver_version=words,
    )
    issues = {issue.name: issue for region in regions for issue in issues_of(region)}
    return {
        "vram_bytes_per_gpu": cost.vram_bytes_per_gpu,
        "kernel_bytes": cost.kernel_bytes,
        "page_table_bytes": cost.page_table_bytes,
        "faults": [asdict(issue) for issue in issues.values()],
    }


def _registering_lines(registering: dict[str, Any]) -> Iterator[str]:
    yield (
        f"registering it takes {format_bytes(registering['vram_bytes_per_gpu'])} of each GPU and "
        f"{format_bytes(registering['kernel_bytes'])} of the kernel's memory (reckoned)"
    )
    for issue in registering["faults"]:
        word = "note" if issue["severity"] == "info" else issue["severity"]
        yield f"{word}: {issue['what']}; {issue['remedy']}"
