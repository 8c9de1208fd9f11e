"""What can be done to a request on its way to the API server: descriptions, and who is hit."""

from __future__ import annotations

import random
import re
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum


class Action(Enum):
    """What happens to a request that is hit."""

    ANSWER = "answer"
    EXPIRED = "expired"
    DELAY = "delay"
    CUT = "cut"


@dataclass(frozen=True, slots=True)
class Asked:
    """A request as the proxy saw it."""

    method: str
    path: str
    query: Mapping[str, str]

    @property
    def is_watch(self) -> bool:
        """Whether it asks for a stream of changes."""
        return self.query.get("watch") in {"true", "1"}


@dataclass(frozen=True, slots=True)
class Fault:
    """One rule. Made by `answer`, `expired`, `delay` and `cut`; narrowed by `only`."""

    action: Action
    status: int = 0
    seconds: float = 0.0
    share: float = 1.0
    """Of the requests that match, from 0 to 1."""
    times: int | None = None
    """How often at most; None for as long as the rule is there."""
    path: str = ""
    """Regular expression searched for in the path."""
    methods: frozenset[str] = frozenset()
    """Empty for all."""
    watches: bool | None = None
    """True for watches only, False for everything else, None for both."""

    def matches(self, asked: Asked) -> bool:
        """Whether the rule speaks of such a request; share and times are not looked at."""
        return (
            (not self.methods or asked.method in self.methods)
            and (self.watches is None or self.watches == asked.is_watch)
            and re.search(self.path, asked.path) is not None
        )


def answer(
    status: int,
    *,
    retry_after_s: float = 0.0,
    share: float = 1.0,
    times: int | None = None,
    path: str = "",
    methods: tuple[str, ...] = (),
    watches: bool | None = None,
) -> Fault:
    """Answer `status` with a Kubernetes Status; the request never reaches the API server."""
    return Fault(
        Action.ANSWER,
        status=status,
        seconds=retry_after_s,
        share=share,
        times=times,
        path=path,
        methods=frozenset(methods),
        watches=watches,
    )


def expired(*, share: float = 1.0, times: int | None = None, path: str = "") -> Fault:
    """Watches get an ERROR event with code 410 in their stream, as after etcd's compaction."""
    return Fault(Action.EXPIRED, share=share, times=times, path=path, watches=True)


def delay(
    seconds: float,
    *,
    share: float = 1.0,
    times: int | None = None,
    path: str = "",
    methods: tuple[str, ...] = (),
    watches: bool | None = None,
) -> Fault:
    """Hold a request back before it is passed on."""
    return Fault(
        Action.DELAY,
        seconds=seconds,
        share=share,
        times=times,
        path=path,
        methods=frozenset(methods),
        watches=watches,
    )


def cut(
    *,
    share: float = 1.0,
    times: int | None = None,
    path: str = "",
    methods: tuple[str, ...] = (),
    watches: bool | None = None,
) -> Fault:
    """Close the connection without an answer; the request never reaches the API server."""
    return Fault(
        Action.CUT,
        share=share,
        times=times,
        path=path,
        methods=frozenset(methods),
        watches=watches,
    )


class FaultList:
    """The rules in force; safe to change from any thread while requests pass."""

    def __init__(self, seed: int = 0) -> None:
        self._random = random.Random(seed)
        self._lock = threading.Lock()
        self._left: dict[int, tuple[Fault, int | None]] = {}
        self._next = 0

    def add(self, fault: Fault) -> Callable[[], None]:
        """Put a rule in force; returns what takes it away again."""
        with self._lock:
            key = self._next
            self._next += 1
            self._left[key] = (fault, fault.times)
        return lambda: self._remove(key)

    def clear(self) -> None:
        """No rules."""
        with self._lock:
            self._left.clear()

    def hitting(self, asked: Asked) -> list[Fault]:
        """The rules that hit this request, in the order they were added; counts them as used."""
        hit: list[Fault] = []
        with self._lock:
            for key, (fault, left) in list(self._left.items()):
                if left == 0 or not fault.matches(asked) or self._random.random() >= fault.share:
                    continue
                self._left[key] = (fault, None if left is None else left - 1)
                hit.append(fault)
        return hit

    def _remove(self, key: int) -> None:
        with self._lock:
            self._left.pop(key, None)
