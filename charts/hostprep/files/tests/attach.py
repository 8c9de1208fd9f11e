"""`helm test`: attach to a pool as an engine does. Arguments: URL of the metrics, pool, seconds."""

# ruff: noqa: INP001, S310, T201  runs in a pod of the chart, by itself
import os
import re
import subprocess
import sys
import time
import urllib.request

HOW = (
    "helm upgrade RELEASE charts/hostprep --reset-then-reuse-values"
    " --set test.attach.pool=POOL,test.attach.gid=GID"
)


def ready_nodes(url: str, deadline_s: float) -> dict[str, int]:
    """Return how many nodes are ready of each pool, as the operator counts them.

    Exits with 1 when it does not answer until `deadline_s`, in time.monotonic().
    """
    name = "hostprep_operator_pool_nodes"
    series = re.compile(name + r'\{(?=.*state="ready").*pool="([^"]+)".*\} (\d+)')
    while True:
        try:
            with urllib.request.urlopen(url, timeout=5) as reply:
                lines = reply.read().decode().splitlines()
            found = (series.match(line) for line in lines)
            return {match[1]: int(match[2]) for match in found if match}
        except OSError as error:
            if time.monotonic() > deadline_s:
                sys.exit(f"failed: {url} does not answer: {error}")
            time.sleep(1)


def main(url: str, pool: str, seconds: int) -> None:
    """Attach, say how long that took; exits with 1 and says what is in the way."""
    pools = ready_nodes(url, time.monotonic() + min(seconds, 60))
    counts = ", ".join(f"{name} (ready on {count} nodes)" for name, count in sorted(pools.items()))
    if not pool:
        there = f"test.attach.pool names none of {counts}" if pools else "there is no pool"
        print(f"skipped: {there}. With a pool, and its access.gid: {HOW}")
        return
    if pool not in pools:
        sys.exit(f"failed: there is no pool {pool}; {counts or 'there is none at all'}")
    node, root = os.environ.get("NODE_NAME", "this node"), os.environ["HOSTPREP_ROOT"]
    print(f"on {node}; pools: {counts}", flush=True)
    for command in (["wait", pool], ["attach", pool]):
        done = subprocess.run(["hostprep", *command, "--wait", str(seconds)], check=False)
        if done.returncode != 0:
            sys.exit(
                f"failed: hostprep {' '.join(command)} in {root} of {node}. If {pool} is on other"
                " nodes, test.attach.nodeSelector takes the pod there; if it may not enter,"
                " test.attach.gid must be the pool's access.gid"
            )


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
