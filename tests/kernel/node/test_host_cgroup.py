"""The host-level cgroup, entered for real: from this cgroup, and from a namespace below it.

Cgroup v1 here or v2: what is tested is the same. That `nsdelegate` refuses whoever has not crossed
is shown on the virtual machine (tests/node).
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hostprep.agent.messages import Done, ReconcileRequest, decode, encode
from hostprep.linux.processes import first_cgroup_namespace
from hostprep.node.apply import cgroups
from hostprep.node.apply.cgroups import NAME, host_cgroup, remove_host_cgroup
from hostprep.node.apply.service import Node
from hostprep.node.facts import Facts
from hostprep.node.observe.cgroups import parse_own_paths
from hostprep.node.observe.host import read_mounts
from testbed.machine import pool_of
from tests.kernel.worker_process import wanted

pytestmark = pytest.mark.kernel

_STRANDED = """
import sys
from hostprep.agent import worker
from hostprep.node.apply import cgroups

there = cgroups._move_to

def move(folder):
    if not folder.endswith("/hostprep"):
        raise OSError(19, "No such device")
    there(folder)

cgroups._move_to = move
sys.exit(worker.main(["--root", sys.argv[1], "--host", sys.argv[2]]))
"""
_PROGRAM = """
import sys
from hostprep.node.apply.cgroups import host_cgroup
from hostprep.node.apply.service import Node
from hostprep.linux.processes import first_cgroup_namespace

def paths():
    with first_cgroup_namespace():
        return open("/proc/self/cgroup").read().count("/hostprep\\n")

facts = Node(sys.argv[1]).facts()
print(facts.cgroup.path, facts.cgroup.namespaced, flush=True)
print(paths(), flush=True)
with host_cgroup(facts):
    print(paths(), flush=True)
    if len(sys.argv) > 2:
        import os, signal
        os.kill(os.getpid(), signal.SIGKILL)
print(paths())
"""


@pytest.fixture
def facts(node: Node) -> Iterator[Facts]:
    with _below_the_top():
        facts = node.facts()
        yield facts
        remove_host_cgroup(facts)


@contextlib.contextmanager
def _below_the_top() -> Iterator[None]:
    """Have this process in a cgroup that charges it: a CI runner may be in none."""
    own = _own()
    with contextlib.ExitStack() as stack:
        for mount in read_mounts():
            names = [""] if mount.fs_type == "cgroup2" else ["memory", "hugetlb"]
            there = [n for n in names if not n or mount.option(n) is not None]
            if mount.fs_type not in ("cgroup", "cgroup2") or mount.fs_root != "/" or not there:
                continue
            if own.get(there[0]) != "/" or "ro" in mount.options:
                continue
            child = Path(mount.path, f"hostprep-test-{os.getpid()}")
            child.mkdir()
            stack.callback(child.rmdir)
            stack.callback(Path(mount.path, "cgroup.procs").write_text, "0")
            (child / "cgroup.procs").write_text("0")
        yield


def _own() -> dict[str, str]:
    return parse_own_paths(Path("/proc/self/cgroup").read_text())


def _run(
    *prefix: str, root: str, options: tuple[str, ...] = ()
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*prefix, sys.executable, "-c", _PROGRAM, root, *options],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def _namespaced(root: str, *options: str) -> subprocess.CompletedProcess[str]:
    """Run it in a cgroup namespace of its own, beside a PID 1 that is in ours."""
    inner = 'unshare --cgroup "$@"; exit $?'
    return _run(
        *("unshare", "--pid", "--fork", "--mount-proc", "sh", "-c", inner, "sh"),
        root=root,
        options=options,
    )


def test_it_is_entered_and_left_again(facts: Facts) -> None:
    before = _own()
    with host_cgroup(facts):
        # Where no cgroup can be made nothing charges this process, and it has nothing to leave.
        assert _own() == before if facts.cgroup.is_top else f"/{NAME}" in _own().values()
    assert _own() == before


def test_it_is_left_again_after_an_error(facts: Facts) -> None:
    before = _own()
    with pytest.raises(KeyError), host_cgroup(facts):
        raise KeyError
    assert _own() == before


def test_who_cannot_return_is_told(facts: Facts, monkeypatch: pytest.MonkeyPatch) -> None:
    if facts.cgroup.is_top:
        pytest.skip("nothing charges this process: there is nothing to leave")
    before, told, homes = _own(), list[str](), list[str]()
    give_back = cgroups._return_to

    def lose(folder: str, tell: Callable[[str], None]) -> None:
        homes.append(folder)
        give_back(f"/none{folder}", tell)

    monkeypatch.setattr(cgroups, "_return_to", lose)
    with host_cgroup(facts, on_return_failed=told.append):
        pass
    for home in homes:
        cgroups._move_to(home)
    assert _own() == before
    assert [why.split(":")[0] for why in told] == [
        f"cannot return to cgroup /none{home}" for home in homes
    ]
    assert told


def test_a_worker_that_cannot_return_ends_after_its_job(
    node: Node, facts: Facts, tmp_path: Path
) -> None:
    if facts.cgroup.is_top:
        pytest.skip("nothing charges this process: there is nothing to leave")
    request = encode(ReconcileRequest(number=1, pools=wanted(pool_of())))
    with subprocess.Popen(
        [sys.executable, "-c", _STRANDED, node.root, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as worker:
        assert worker.stdin is not None
        assert worker.stdout is not None
        assert worker.stderr is not None
        worker.stdin.write(request)
        worker.stdin.flush()  # and left open: it is not told to end
        heard = [decode(line) for line in worker.stdout]
        said = worker.stderr.read().decode()
        assert worker.wait(timeout=60) == 0
    assert isinstance(heard[-1], Done)
    assert heard[-1].error is None
    assert f"worker {worker.pid} ends: cannot return to cgroup" in said
    assert node.facts().pools[0].published


def test_a_cgroup_namespace_is_crossed_for_the_look_and_for_the_work(
    node: Node, facts: Facts
) -> None:
    done = _namespaced(node.root)
    assert done.returncode == 0, done.stderr
    path, namespaced, *inside = done.stdout.split()
    assert path == facts.cgroup.path
    assert namespaced == "False"
    assert inside[0] == inside[2] == "0"
    assert int(inside[1]) >= 1


def test_killed_inside_it_leaves_the_next_one_able_to_go_on(node: Node, facts: Facts) -> None:
    first = _namespaced(node.root, "die")
    assert first.returncode == 137, first.stderr
    assert len(first.stdout.split()) == 4
    second = _namespaced(node.root)
    assert second.returncode == 0, second.stderr
    assert int(second.stdout.split()[3]) >= 1


def test_where_it_may_not_cross_its_path_is_a_namespaces(node: Node, facts: Facts) -> None:
    """Without CAP_SYS_ADMIN no namespace is entered."""
    drop = ("setpriv", "--bounding-set", "-sys_admin", "--inh-caps", "-sys_admin")
    inner = 'unshare --cgroup "$@"; exit $?'
    done = _run(
        *("unshare", "--pid", "--fork", "--mount-proc", "sh", "-c", inner, "sh", *drop),
        root=node.root,
    )
    path, namespaced = done.stdout.split()[:2]
    assert (path, namespaced) == ("/", "True")


_SHUT_OUT = """
import json, sys
from dataclasses import replace
from hostprep.node.apply.cgroups import host_cgroup
from hostprep.node.apply.service import Node
from hostprep.errors import HostprepError

def paths():
    return open("/proc/self/cgroup").read()

facts, before, said = Node(sys.argv[1]).facts(), paths(), {}
limits = {"memory_limit_bytes": None, "hugetlb_limit_bytes": (), **json.loads(sys.argv[2])}
facts = replace(facts, cgroup=replace(facts.cgroup, **limits))
try:
    with host_cgroup(facts):
        said["inside"] = paths() == before
except HostprepError as error:
    said = {"reason": error.reason, "why": str(error)}
print(json.dumps({**said, "after": paths() == before}))
"""

_READ_ONLY = """
for folder in $(awk '/ - cgroup2? / {print $5}' /proc/self/mountinfo); do
    mount -o remount,bind,ro "$folder" || exit 1
done
"$@"; exit $?
"""


def _shut_out(root: str, **limits: object) -> dict[str, object]:
    """Run it beside a PID 1 that sees the cgroups read-only, as in a container."""
    prefix = ("unshare", "--mount", "--pid", "--fork", "--mount-proc", "sh", "-c", _READ_ONLY, "sh")
    program = (sys.executable, "-c", _SHUT_OUT, root, json.dumps(limits))
    done = subprocess.run(
        [*prefix, *program], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
    said: dict[str, object] = json.loads(done.stdout)
    return said


@pytest.mark.parametrize(
    "limits",
    [{"memory_limit_bytes": 1 << 30}, {"hugetlb_limit_bytes": [[2 << 20, 0]]}],
)
def test_what_would_be_charged_to_a_pod_is_refused_with_what_to_do(
    node: Node, facts: Facts, limits: dict[str, object]
) -> None:
    said = _shut_out(node.root, path="/kubepods/pod1", **limits)
    assert "inside" not in said, "it populated all the same"
    assert (said["reason"], said["after"]) == ("ChargedToPod", True)
    assert "hostPID: true" in str(said["why"])
    assert "from their top" in str(said["why"])


def test_where_nothing_limits_it_stays(node: Node, facts: Facts) -> None:
    assert _shut_out(node.root, path="/a") == {"inside": True, "after": True}


def test_this_namespace_is_the_first_or_can_be_told_from_it() -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root")
    with first_cgroup_namespace() as crossed:
        assert not crossed
