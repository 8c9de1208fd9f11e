"""The real driver, with the stand-in's log: the same tests read the same lines of it.

What cannot be ordered of a real driver (failures, other devices) is not tested with it.
"""

from __future__ import annotations

import fcntl
import importlib
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any


def record_calls(log: Path, lock: Path) -> None:
    """Have this process's calls by cuda-python written down; `lock` makes them wait, if held."""
    api: Any = importlib.import_module("cuda.bindings.driver")

    def write(text: str) -> None:
        with log.open("a", encoding="ascii") as file:
            file.write(f"{os.getpid()} {threading.get_native_id()} {text}\n")

    def wrap(name: str, word: str, work: Callable[..., tuple[Any, ...]]) -> None:
        original = getattr(api, name)

        def call(*arguments: Any) -> tuple[Any, ...]:
            result = work(original, *arguments)
            numbers = ",".join(str(int(argument)) for argument in arguments)
            last = result[-1] if word == "capture_mode" else result[0]
            write(f"{word}({numbers})={int(last)}")
            return result

        setattr(api, name, call)

    def plainly(original: Any, *arguments: Any) -> tuple[Any, ...]:
        return tuple(original(*arguments))

    def in_line(original: Any, *arguments: Any) -> tuple[Any, ...]:
        with lock.open("a", encoding="ascii") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            write("enter")
            try:
                return tuple(original(*arguments))
            finally:
                write("leave")

    wrap("cuInit", "init", plainly)
    wrap("cuMemHostRegister", "register", in_line)
    wrap("cuMemHostUnregister", "unregister", plainly)
    wrap("cuThreadExchangeStreamCaptureMode", "capture_mode", plainly)
