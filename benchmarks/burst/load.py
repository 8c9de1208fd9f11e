"""A light stream of short requests, from before the server is there until it is told to stop."""

from __future__ import annotations

import http.client
import json
import threading
import time
import urllib.request
from dataclasses import dataclass, field
from typing import Any

PROMPT_TOKENS = 300
_ANSWER_TOKENS = 16
_EVERY_S = 1.0
_MOST_AT_ONCE = 4
_TIMEOUT_S = 120.0


@dataclass(slots=True)
class Tally:
    """What came of it; moments are of time.monotonic()."""

    tokens_at_s: list[float] = field(default_factory=list)
    """One moment for each token that arrived."""
    completed: int = 0
    turned_away: int = 0
    """Requests of which no token arrived."""


class Load:
    """Sends a request each second, of which four at most are on their way."""

    def __init__(self, port: int, *, every_s: float = _EVERY_S) -> None:
        self.tally = Tally()
        self._port = port
        self._every_s = every_s
        self._model = ""
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._free = threading.Semaphore(_MOST_AT_ONCE)
        self._thread = threading.Thread(target=self._send_all, daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """Send no more, and wait for what is on its way."""
        self._stop.set()
        self._thread.join(_TIMEOUT_S)
        for _ in range(_MOST_AT_ONCE):
            self._free.acquire(timeout=_TIMEOUT_S)

    def _send_all(self) -> None:
        number = 0
        while not self._stop.wait(self._every_s):
            number += 1
            if self._free.acquire(blocking=False):
                threading.Thread(target=self._send, args=(number,), daemon=True).start()

    def _send(self, number: int) -> None:
        tokens = 0
        try:
            tokens = self._stream(number)
        except (OSError, http.client.HTTPException, ValueError):
            pass  # it is not there yet, or has gone: that is what is counted
        finally:
            with self._lock:
                self.tally.completed += tokens > 0
                self.tally.turned_away += tokens == 0
            self._free.release()

    def _stream(self, number: int) -> int:
        """Send one request, note each token's moment; return how many came."""
        if not self._model:
            self._model = str(json.loads(get(self._port, "/v1/models"))["data"][0]["id"])
        # No two begin alike: nothing is answered out of a cache.
        prompt = [(at * 7 + number * 131) % 1000 + 3 for at in range(PROMPT_TOKENS)]
        document = {
            "model": self._model, "prompt": prompt, "max_tokens": _ANSWER_TOKENS,
            "temperature": 0, "ignore_eos": True, "stream": True, "return_token_ids": True,
        }  # fmt: skip
        request = urllib.request.Request(
            f"http://127.0.0.1:{self._port}/v1/completions",
            json.dumps(document).encode(),
            {"Content-Type": "application/json"},
        )
        tokens = 0
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as answer:
            for line in answer:
                tokens += self._note(line.decode("utf-8", "replace").strip())
        return tokens

    def _note(self, line: str) -> int:
        if not line.startswith("data: {"):
            return 0
        choices: list[dict[str, Any]] = json.loads(line[len("data: ") :]).get("choices", [])
        count = sum(len(each.get("token_ids") or ()) for each in choices)
        now_s = time.monotonic()
        with self._lock:
            self.tally.tokens_at_s += [now_s] * count
        return count


def get(port: int, path: str, timeout_s: float = 5.0) -> str:
    """Return what a server on loopback answers with 200. Raises OSError."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=timeout_s) as answer:
        return str(answer.read().decode())
