"""/proc/self/mountinfo: fields, escapes, what is kept."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hostprep.node.facts import Mount
from hostprep.node.observe import HostRoot
from hostprep.node.observe.host import (
    below,
    parse_mountinfo_line,
    read_mounts,
    unescape,
)

pytestmark = pytest.mark.unit

_CHARACTERS = st.characters(exclude_characters="\0", exclude_categories=["Cs"])
_NAMES = st.text(_CHARACTERS, max_size=20)
_WORDS = st.text(_CHARACTERS, min_size=1, max_size=12)
_OPTIONS = st.lists(
    st.text(
        st.characters(exclude_characters="\0,", exclude_categories=["Cs"]), min_size=1, max_size=12
    ),
    min_size=1,
    max_size=5,
    unique=True,
).filter(lambda options: options[0] != "-")  # the kernel's own options are words such as rw


def _escape(text: str) -> str:
    """Print as the kernel's mangle() in fs/proc_namespace.c."""
    return "".join(f"\\{ord(c):03o}" if c in " \t\n\\#" else c for c in text)


def _print(mount: Mount, *, tags: str = "") -> str:
    own, fs = mount.options[:1], mount.options[1:]
    fields = [f"36 35 {mount.device[0]}:{mount.device[1]}", mount.fs_root, mount.path]
    head = [fields[0], _escape(fields[1]), _escape(fields[2]), *map(_escape, own)]
    tail = [_escape(mount.fs_type), _escape(mount.source), ",".join(map(_escape, fs)) or "rw"]
    return " ".join([*head, *([tags] if tags else []), "-", *tail])


@given(_NAMES)
def test_escapes_read_back(text: str) -> None:
    assert unescape(_escape(text)) == text


@given(
    path=_NAMES.map("/{}".format),
    fs_type=_WORDS,
    source=_WORDS,
    options=_OPTIONS,
    tags=st.sampled_from(["", "shared:1", "shared:1 master:7 unbindable"]),
)
def test_a_mount_reads_back(
    path: str, fs_type: str, source: str, options: list[str], tags: str
) -> None:
    shown = (*options, "rw") if len(options) == 1 and options != ["rw"] else tuple(options)
    mount = Mount(path, fs_type, source, shown, device=(259, 12), fs_root=path)
    assert parse_mountinfo_line(_print(mount, tags=tags)) == mount


@given(st.text())
def test_no_line_raises(text: str) -> None:
    parse_mountinfo_line(text)
    unescape(text)


def test_own_and_file_system_options_are_both_kept_once() -> None:
    entry = parse_mountinfo_line(
        "28 25 0:30 / /dev/huge\\040pages ro,relatime shared:17 - hugetlbfs none ro,pagesize=2M"
    )
    assert entry is not None
    assert entry.path == "/dev/huge pages"
    assert entry.options == ("ro", "relatime", "pagesize=2M")
    assert entry.option("pagesize") == "2M"


def test_broken_lines_cost_themselves_only_and_are_counted(tmp_path: Path) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    good = "26 22 0:25 / /run rw,nosuid - tmpfs tmpfs rw,mode=755"
    (tmp_path / "proc/self/mountinfo").write_text(f"garbage\n{good}\n26 22 x / /a rw - t s rw\n")
    warnings: list[str] = []
    mounts = read_mounts(HostRoot(tmp_path), warnings.append)
    assert [mount.path for mount in mounts] == ["/run"]
    assert warnings == ["/proc/self/mountinfo: 2 lines make no sense"]


def test_everything_is_below_the_top() -> None:
    assert below("/a/b", "/")
    assert below("/", "/")
    assert not below("/ab", "/a")
