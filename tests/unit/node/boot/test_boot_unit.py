"""`boot: systemd`: files on a node's root folder, kept, changed and removed; nobody else's."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hostprep.api.pool_spec import PoolSpec
from hostprep.errors import NotReadyError
from hostprep.node.boot import boot_script, systemd_unit
from hostprep.node.boot.install import UNIT, BootUnit, host_folder, sync_boot_unit

pytestmark = pytest.mark.unit

ROOT = "/run/hostprep"


def _pool(name: str = "kv", **changes: object) -> PoolSpec:
    return PoolSpec(**({"name": name, "size_bytes": 8 << 30} | changes))  # type: ignore[arg-type]


@pytest.fixture
def host(tmp_path: Path) -> Path:
    return _node(tmp_path / "node")


def _node(folder: Path) -> Path:
    for path in ("run/systemd/system", "etc/systemd/system/multi-user.target.wants"):
        (folder / path).mkdir(parents=True)
    return folder


def _keep(host: Path, *wanted: PoolSpec, unwanted: tuple[str, ...] = ()) -> BootUnit:
    return sync_boot_unit(wanted, unwanted, root=ROOT, host=str(host))


def _tree(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Return all that is there: inode and content (or target)."""
    found = {}
    for path in sorted(folder.rglob("*")):
        status = path.lstat()
        if stat.S_ISREG(status.st_mode):
            content = path.read_bytes()
        else:
            content = os.readlink(path).encode() if path.is_symlink() else b"/"
        found[str(path.relative_to(folder))] = (status.st_ino, content)
    return found


def test_a_script_and_one_unit_for_all_pools_are_written_and_enabled(host: Path) -> None:
    said = _keep(host, _pool("batch"), _pool("kv", priority=10))

    assert said == BootUnit(pools=("kv", "batch"))
    script = (host / "etc/hostprep/kv.sh").read_text()
    assert script.endswith(boot_script(_pool("kv", priority=10), root=ROOT))
    unit = (host / "etc/systemd/system" / UNIT).read_text()
    assert unit.endswith(systemd_unit("/etc/hostprep/kv.sh", "/etc/hostprep/batch.sh"))
    link = host / "etc/systemd/system/multi-user.target.wants" / UNIT
    assert os.readlink(link) == f"/etc/systemd/system/{UNIT}"


def test_what_is_right_is_not_written_again(host: Path) -> None:
    _keep(host, _pool("kv"), _pool("batch"))
    before = _tree(host)
    assert _keep(host, _pool("kv"), _pool("batch"), unwanted=("other",)).failures == ()
    assert _tree(host) == before


def test_a_changed_policy_changes_its_script_alone(host: Path) -> None:
    _keep(host, _pool("kv"), _pool("batch"))
    before = _tree(host)
    _keep(host, _pool("kv", size_bytes=16 << 30), _pool("batch"))
    after = _tree(host)
    assert {path for path in after if after[path] != before[path]} == {"etc/hostprep/kv.sh"}


def test_an_edited_file_is_put_right_again(host: Path) -> None:
    _keep(host, _pool())
    before = {path: content for path, (_, content) in _tree(host).items()}
    unit = host / "etc/systemd/system" / UNIT
    unit.write_text(unit.read_text() + "Restart=always\n")
    _keep(host, _pool())
    assert {path: content for path, (_, content) in _tree(host).items()} == before


def test_the_node_is_left_as_it_was(host: Path) -> None:
    before = _tree(host)
    _keep(host, _pool("kv"), _pool("batch"))
    assert _keep(host, _pool("kv"), unwanted=("batch",)).pools == ("kv",)
    assert not (host / "etc/hostprep/batch.sh").exists()
    assert _keep(host, unwanted=("kv", "batch")) == BootUnit()
    assert _tree(host) == before


def test_pools_of_which_nothing_is_said_stay(host: Path) -> None:
    """No HostMemoryNode is no instruction; a removed entry leaves its pool as it is."""
    _keep(host, _pool("kv"), _pool("batch"))
    before = _tree(host)
    assert _keep(host) == BootUnit()
    assert _tree(host) == before
    assert _keep(host, _pool("kv")).pools == ("kv", "batch")
    assert _keep(host, unwanted=("kv",)).pools == ("batch",)


def test_what_a_killed_run_left_is_finished_or_cleared_away(host: Path) -> None:
    before = _tree(host)
    _keep(host, _pool())
    (host / "etc/systemd/system/multi-user.target.wants" / UNIT).unlink()
    (host / "etc/hostprep/.kv.sh.new").write_text("half")
    assert _keep(host, _pool()) == BootUnit(pools=("kv",))
    assert (host / "etc/systemd/system/multi-user.target.wants" / UNIT).is_symlink()
    (host / "etc/hostprep/.kv.sh.new").write_text("half")
    _keep(host, unwanted=("kv",))
    assert _tree(host) == before


@pytest.mark.parametrize("folder", ["etc/hostprep", "etc/systemd/system"])
def test_a_half_written_file_is_cleared_away_where_none_was_finished(
    host: Path, folder: str
) -> None:
    before = _tree(host)
    (host / folder).mkdir(exist_ok=True)
    name = UNIT if folder.endswith("system") else "kv.sh"
    (host / folder / f".{name}.new").write_text("half")
    assert _keep(host, unwanted=("kv",)) == BootUnit()
    assert _tree(host) == before


@pytest.mark.parametrize(
    "theirs",
    [
        "etc/hostprep/kv.sh",
        f"etc/systemd/system/{UNIT}",
        f"etc/systemd/system/multi-user.target.wants/{UNIT}",
    ],
)
def test_files_of_others_are_neither_changed_nor_removed(host: Path, theirs: str) -> None:
    (host / theirs).parent.mkdir(exist_ok=True)
    (host / theirs).write_text("an administrator's\n")

    ((pool, why),) = _keep(host, _pool()).failures

    assert pool == "kv"
    assert theirs in why
    assert "boot: None" in why
    _keep(host, unwanted=("kv",))
    assert (host / theirs).read_text() == "an administrator's\n"


def test_a_unit_that_somebody_installed_by_hand_stays_enabled(host: Path) -> None:
    """Each round says so of every pool with boot: none."""
    unit = host / "etc/systemd/system" / UNIT
    unit.write_text("[Service]\nExecStart=/bin/true\n")
    link = host / "etc/systemd/system/multi-user.target.wants" / UNIT
    link.symlink_to(f"/etc/systemd/system/{UNIT}")
    before = _tree(host)
    assert _keep(host, unwanted=("kv", "batch")) == BootUnit()
    assert _tree(host) == before


def test_a_link_of_ours_whose_unit_is_gone_goes_too(host: Path) -> None:
    before = _tree(host)
    _keep(host, _pool())
    (host / "etc/systemd/system" / UNIT).unlink()
    assert _keep(host, unwanted=("kv",)) == BootUnit()
    assert _tree(host) == before


def test_a_masked_unit_stays_masked(host: Path) -> None:
    (host / "etc/systemd/system" / UNIT).symlink_to("/dev/null")
    assert "boot: None" in dict(_keep(host, _pool()).failures)["kv"]
    assert os.readlink(host / "etc/systemd/system" / UNIT) == "/dev/null"


def test_a_link_on_the_way_is_not_followed(host: Path, tmp_path: Path) -> None:
    """An absolute one would lead into the agent's own container."""
    (host / "etc/systemd/system/multi-user.target.wants").rmdir()
    (host / "etc/systemd/system").rmdir()
    (tmp_path / "elsewhere").mkdir()
    (host / "etc/systemd/system").symlink_to(tmp_path / "elsewhere")
    assert _keep(host, _pool()).failures
    assert list((tmp_path / "elsewhere").iterdir()) == []


@pytest.mark.parametrize("path", ["etc/hostprep", "etc/systemd/system"])
def test_where_nothing_of_ours_can_be_there_is_nothing_to_remove(
    host: Path, tmp_path: Path, path: str
) -> None:
    """NixOS: /etc/systemd/system is a link. A pool that never asked has nothing to hear of it."""
    elsewhere = tmp_path / "elsewhere"
    (elsewhere / "multi-user.target.wants").mkdir(parents=True)
    (elsewhere / "kv.sh").write_text("theirs")
    if path == "etc/systemd/system":
        (host / path / "multi-user.target.wants").rmdir()
        (host / path).rmdir()
    (host / path).symlink_to(elsewhere)
    assert _keep(host, unwanted=("kv", "batch")) == BootUnit()
    assert (elsewhere / "kv.sh").read_text() == "theirs"


@pytest.mark.parametrize("failing", ["listdir", "read"])
def test_what_cannot_be_read_is_not_taken_for_missing(
    host: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    """A bad disk: the unit must not go while scripts stand."""
    _keep(host, _pool("kv"), _pool("batch"))
    before = _tree(host)

    def fail(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patched:
        patched.setattr(os, failing, fail)
        said = _keep(host, unwanted=("batch",))
    assert dict(said.failures).keys() == {"batch"}
    after = _tree(host)
    assert {path for path in before if after.get(path) != before[path]} <= {"etc/hostprep/batch.sh"}
    assert _keep(host, unwanted=("batch",)) == BootUnit(pools=("kv",))


def test_a_node_out_of_reach_is_said_of_the_pools_that_have_a_script_there(
    host: Path, tmp_path: Path
) -> None:
    """Once boot: systemd, later an agent without hostPID: the script reserves at every boot."""
    state, none = tmp_path / "state", str(tmp_path / "none")
    state.mkdir()

    def keep(where: str, *specs: PoolSpec, unwanted: tuple[str, ...] = ()) -> BootUnit:
        return sync_boot_unit(specs, unwanted, root=ROOT, host=where, state=str(state))

    assert keep(none, unwanted=("kv", "batch")) == BootUnit()
    keep(str(host), _pool("kv"), unwanted=("batch",))

    ((pool, why),) = keep(none, unwanted=("kv", "batch")).failures
    assert pool == "kv"
    assert "/etc/hostprep/kv.sh may still reserve pages" in why
    assert "agent.hostPID=true" in why
    assert f"{state}/boot-scripts" in why
    assert dict(keep(none, _pool("batch"), unwanted=("kv",)).failures).keys() == {"kv", "batch"}

    assert keep(str(host), unwanted=("kv",)) == BootUnit()
    assert keep(none, unwanted=("kv",)) == BootUnit()


@pytest.mark.parametrize("spoilt", ["folder", "link", "garbage", "gone"])
def test_a_spoilt_record_stops_nothing(host: Path, tmp_path: Path, spoilt: str) -> None:
    state, theirs = tmp_path / "state", tmp_path / "theirs"
    theirs.write_text("kv\n")
    if spoilt != "gone":
        state.mkdir()
    if spoilt == "folder":
        (state / "boot-scripts").mkdir()
    elif spoilt == "link":
        (state / "boot-scripts").symlink_to(theirs)
    elif spoilt == "garbage":
        (state / "boot-scripts").write_bytes(b"\xff\0" * 1000)
    said = sync_boot_unit([], ("kv",), root=ROOT, host=str(tmp_path / "none"), state=str(state))
    assert said == BootUnit()
    said = sync_boot_unit([_pool()], (), root=ROOT, host=str(host), state=str(state))
    assert said == BootUnit(pools=("kv",))
    assert theirs.read_text() == "kv\n"


def test_without_systemd_nothing_is_written(tmp_path: Path) -> None:
    (tmp_path / "etc").mkdir()
    ((_, why),) = _keep(tmp_path, _pool()).failures
    assert "no systemd" in why
    assert "hostprep boot --script" in why
    assert list((tmp_path / "etc").iterdir()) == []


@pytest.mark.parametrize("name", ["kv", "batch"])
def test_one_script_that_cannot_be_stops_no_other(host: Path, name: str) -> None:
    said = sync_boot_unit(
        [_pool(name), PoolSpec(name="b" * 80, size_bytes=1)], (), root=ROOT, host=str(host)
    )
    assert said.pools == (name,)
    assert dict(said.failures).keys() == {"b" * 80}


def test_a_root_that_a_shell_would_misread_is_refused(host: Path) -> None:
    said = sync_boot_unit([_pool()], (), root="/run/a b", host=str(host))
    assert "plain absolute path" in dict(said.failures)["kv"]
    assert not (host / "etc/hostprep").exists()


def test_a_host_that_is_not_there_is_said(tmp_path: Path) -> None:
    said = _keep(tmp_path / "none", _pool())
    assert dict(said.failures).keys() == {"kv"}
    assert _keep(tmp_path / "none", unwanted=("kv",)) == BootUnit()


def test_the_hosts_folder_is_found_or_the_reason_told() -> None:
    assert _host_folder() in ("/", "/proc/1/root") or "hostPID" in _host_folder()


def _host_folder() -> str:
    try:
        return host_folder()
    except NotReadyError as error:
        return str(error)


_NAMES = ("a", "b", "c")
_STATES = st.fixed_dictionaries(
    {name: st.sampled_from(["none", "systemd", "unsaid"]) for name in _NAMES}
)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(history=st.lists(_STATES, min_size=1, max_size=5))
def test_whatever_came_before_the_last_word_counts(
    tmp_path_factory: pytest.TempPathFactory, history: list[dict[str, str]]
) -> None:
    host = _node(tmp_path_factory.mktemp("node") / "root")
    before = _tree(host)
    standing: set[str] = set()
    for states in history:
        wanted = [_pool(name) for name, state in states.items() if state == "systemd"]
        unwanted = tuple(name for name, state in states.items() if state == "none")
        standing = (standing | {spec.name for spec in wanted}) - set(unwanted)
        said = _keep(host, *wanted, unwanted=unwanted)
        assert said.failures == ()
        assert set(said.pools) == (standing if wanted or unwanted else set())
        if standing:
            unit = (host / "etc/systemd/system" / UNIT).read_text()
            assert unit.count("ExecStart=") == len(standing)
    _keep(host, unwanted=_NAMES)
    assert _tree(host) == before
