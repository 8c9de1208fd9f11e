"""Links in place of what is ours: root changes no owner and no mode by them.

Engines without root cannot plant these (the folders around are root's); one that runs as root
with the root mounted writable can.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from hostprep.errors import HostprepError
from hostprep.linux.files import closing_fd, make_folder, set_file_access
from tests.kernel.hostile.attackers import ATTACKED, BYSTANDER, ENGINE, REGION, Pools

pytestmark = pytest.mark.kernel


@pytest.fixture
def precious(tmp_path: Path) -> Path:
    """A folder of somebody else's, with a file."""
    folder = tmp_path / "precious"
    folder.mkdir(mode=0o711)
    (folder / "users").write_text("years")
    (folder / "users").chmod(0o604)
    return folder


def access_of(*paths: Path) -> list[tuple[int, int, int]]:
    return [(s.st_uid, s.st_gid, s.st_mode) for s in (path.stat() for path in paths)]


def _state_of_region(pools: Pools) -> str:
    return pools.attacked.state_of(REGION)


def _state(pools: Pools) -> str:
    return pools.attacked.state


def _tickets(pools: Pools) -> str:
    return pools.attacked.tickets


def _links(pools: Pools) -> str:
    return pools.attacked.links


def _folder(pools: Pools) -> str:
    return pools.attacked.folder


@pytest.mark.parametrize("where", [_state_of_region, _state, _tickets, _links, _folder])
def test_a_link_in_place_of_a_folder_changes_no_foreign_access(
    pools: Pools, precious: Path, where: Callable[[Pools], str]
) -> None:
    folder = where(pools)
    before = access_of(precious, precious / "users")
    moved = f"{folder}.moved"
    os.rename(folder, moved)
    os.symlink(precious, folder)
    try:
        errors = pools.errors()
        with contextlib.suppress(HostprepError):
            pools.node.prepare(pools.specs)
        assert access_of(precious, precious / "users") == before
        assert (precious / "users").read_text() == "years"
        if where is _folder:
            assert errors[ATTACKED] is not None
            assert errors[BYSTANDER] is None
        else:
            assert errors[ATTACKED] is None
            assert where in (_tickets, _links) or not os.path.islink(folder)
            pools.bystander_works()
    finally:
        if os.path.islink(folder):
            os.unlink(folder)
        if where is _folder:
            os.rename(moved, folder)
        else:
            shutil.rmtree(moved)


def test_a_state_folder_of_another_user_keeps_its_access(pools: Pools) -> None:
    folder = pools.attacked.state_of(REGION)
    os.chown(folder, 1000, 1000)
    os.chmod(folder, 0o700)
    pools.bystander_works()
    assert access_of(Path(folder)) == [(1000, 1000, 0o40700)]
    error = pools.errors()[ATTACKED]
    assert error is not None
    os.chown(folder, 0, 0)


def test_a_file_linked_in_place_of_users_keeps_its_access(pools: Pools) -> None:
    """A hard link, to any file that the engine may write: its group would become the pool's."""
    users = pools.attacked.users_lock(REGION)
    shared = Path(pools.root, ".shared")  # no link leads to another file system
    shared.write_text("of the engine's user and another group")
    os.chown(shared, 1000, 4321)
    shared.chmod(0o640)

    def attack() -> None:
        os.unlink(users)
        os.link(shared, users)

    ENGINE.does(attack)
    before = access_of(shared)
    pools.specs[0] = replace(pools.specs[0], mode=0o600)  # which changes the access of all files
    pools.errors()
    assert access_of(shared) == before
    pools.bystander_works()


def test_a_file_of_two_names_keeps_its_access(precious: Path) -> None:
    os.link(precious / "users", precious / "second")
    before = access_of(precious / "users")
    with closing_fd(os.open(precious / "second", os.O_RDONLY)) as fd:
        with pytest.raises(OSError, match="hard links"):
            set_file_access(fd, mode=0o666, gid=4242)
    assert access_of(precious / "users") == before


@pytest.mark.parametrize("path", ["link", "link/below", "folder/link"])
def test_no_access_is_changed_through_a_link(tmp_path: Path, precious: Path, path: str) -> None:
    (precious / "below").mkdir()
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to(precious)
    (tmp_path / "folder" / "link").symlink_to(precious)
    before = access_of(precious, precious / "below")
    with pytest.raises(OSError, match="link|Not a directory"):
        make_folder(str(tmp_path / path), mode=0o777, gid=4242)
    assert access_of(precious, precious / "below") == before
