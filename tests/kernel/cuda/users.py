"""Users without any right, as in an ordinary pod: children of ours that become them."""

from __future__ import annotations

import encodings.ascii
import hashlib
import logging
import os
from collections.abc import Callable

from tests.support.processes import forked

# What is imported late on their way: this Python may lie where such a user cannot read.
_ = (encodings.ascii, hashlib, logging)


def become(uid: int, *groups: int) -> None:
    """Become a user of these supplementary groups alone, whose umask hides its files."""
    os.setgroups(groups)
    os.setgid(uid)
    os.setuid(uid)
    os.umask(0o077)
    with open("/proc/self/status", encoding="utf-8") as file:
        expect("CapEff:\t0000000000000000" in file.read())


def as_user(uid: int, work: Callable[[], object], *groups: int) -> None:
    """Do it in a child of that user; fails where it raises."""

    def child(ready: Callable[[], None]) -> None:
        become(uid, *groups)
        work()
        ready()

    with forked(child):
        pass


def expect(condition: object, why: object = "") -> None:
    """Raise AssertionError unless it holds; for lambdas."""
    if not condition:
        raise AssertionError(why)
