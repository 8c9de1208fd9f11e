"""`hostprep attach`: what an attach takes on this node, tried out."""

from __future__ import annotations

import argparse
import json
import time

from hostprep.client.attach import attach_many
from hostprep.engines.registering import registering, registering_lines
from hostprep.paths import PoolPaths
from hostprep.units import format_bytes, format_seconds

__all__ = ["run_attach"]


def run_attach(options: argparse.Namespace, paths: PoolPaths, size_bytes: int) -> int:
    """Attach as an engine does, print what it took, and let go. Returns 0.

    Says too what registering with CUDA takes and meets here, where there is a driver.

    Raises HostprepError as `attach_many` does.
    """
    begin_s = time.perf_counter()
    attachments = attach_many(
        paths.pool,
        count=options.count,
        size_bytes=size_bytes,
        numa_node=options.numa_node,
        regions=options.region,
        wait_timeout_s=options.wait,
        root=paths.root,
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
    told = registering([attachment.region for attachment in attachments])
    if options.output == "json":
        names = [attachment.region.name for attachment in attachments]
        all_bytes = sum(attachment.size_bytes for attachment in attachments)
        answer = {"regions": names, "size_bytes": all_bytes, "attach_s": took_s}
        print(json.dumps({**answer, "registering": told}))
    else:
        print(f"attached in {format_seconds(took_s)}, every page present")
        for line in registering_lines(told):
            print(line)
    return 0
