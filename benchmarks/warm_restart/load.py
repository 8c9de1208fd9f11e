"""Questions about a few long documents, one after the other, and how each was served."""

from __future__ import annotations

import http.client
import json
import threading
import time
import urllib.request
from dataclasses import asdict, dataclass
from typing import Any

from testbed.engines.vllm_server import prompt_of

_QUESTION_TOKENS = 40
_ANSWER_TOKENS = 8
_TIMEOUT_S = 300.0
_PAUSE_S = 0.1


@dataclass(frozen=True, slots=True)
class Answer:
    """One request; moments are seconds from where the load began."""

    document: int
    sent_s: float
    first_token_s: float
    end_s: float
    prompt_tokens: int
    cached_tokens: int
    tokens: tuple[int, ...]

    @property
    def waited_s(self) -> float:
        """Time to first token."""
        return self.first_token_s - self.sent_s


def question(document: int, number: int, tokens: int) -> list[int]:
    """Return a prompt: the document's tokens, then a question that was not asked before."""
    return [*prompt_of(document, tokens), *prompt_of(10_000 + number, _QUESTION_TOKENS)]


def ask(port: int, prompt: list[int], document: int, begin_s: float) -> Answer:
    """Send one request and read its answer as it comes. Raises OSError, HTTPException."""
    body = {
        "model": "tiny", "prompt": prompt, "max_tokens": _ANSWER_TOKENS, "temperature": 0,
        "ignore_eos": True, "stream": True, "return_token_ids": True,
        "stream_options": {"include_usage": True},
    }  # fmt: skip
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    sent_s, first_s = time.monotonic(), 0.0
    tokens: list[int] = []
    usage: dict[str, Any] = {}
    with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as answer:
        for raw in answer:
            line = raw.decode("utf-8", "replace").strip()
            if not line.startswith("data: {"):
                continue
            event = json.loads(line[len("data: ") :])
            for choice in event.get("choices", ()):
                tokens += choice.get("token_ids") or ()
            first_s = first_s or (time.monotonic() if tokens else 0.0)
            usage = event.get("usage") or usage
    details = usage.get("prompt_tokens_details") or {}
    return Answer(
        document,
        sent_s - begin_s,
        first_s - begin_s,
        time.monotonic() - begin_s,
        len(prompt),
        int(details.get("cached_tokens") or 0),
        tuple(tokens),
    )


class Load:
    """One client that asks about the documents in turn, from before the server is there."""

    def __init__(self, port: int, documents: int, tokens: int, begin_s: float) -> None:
        self.answers: list[Answer] = []
        self._port = port
        self._documents = documents
        self._tokens = tokens
        self._begin_s = begin_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Send no more, and wait for the last answer."""
        self._stop.set()
        self._thread.join(_TIMEOUT_S)

    def _run(self) -> None:
        number = 0
        while not self._stop.is_set():
            document = number % self._documents
            prompt = question(document, 1_000 + number, self._tokens)
            try:
                self.answers.append(ask(self._port, prompt, document, self._begin_s))
                number += 1
            except (OSError, http.client.HTTPException, ValueError):
                self._stop.wait(_PAUSE_S)  # it is not there yet


def as_json(answers: list[Answer]) -> list[dict[str, Any]]:
    """Return them for -o json, their moments to the tenth of a millisecond."""
    documents = [{**asdict(answer), "waited_s": answer.waited_s} for answer in answers]
    return [
        {key: round(value, 4) if isinstance(value, float) else value for key, value in one.items()}
        for one in documents
    ]
