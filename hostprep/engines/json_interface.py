"""A client for an engine's HTTP interface whose answers are JSON; the standard library alone."""

from __future__ import annotations

import http.client
import json
from dataclasses import dataclass
from typing import Any

from hostprep.errors import FailedError, NotReadyError

OK = 200
_ANSWER_TIMEOUT_S = 10.0
_CHANGE_TIMEOUT_S = 600.0
"""An engine registers new memory, with CUDA or an RDMA card, before it answers."""


@dataclass(frozen=True)
class JsonInterface:
    """One engine's interface, and the words for it in errors."""

    host: str
    port: int
    server: str
    """What answers there, as in `LMCache server`."""
    place: str
    """Where, as in `at http://127.0.0.1:8080`."""
    options: str
    """The engine's options that set the address."""
    refused: str
    """The reason where it refuses."""
    remedy: str
    """What to do then."""
    may_answer_text: bool = False
    """Otherwise text that is not JSON means that something else answers there."""

    def ask(self, path: str, body: dict[str, Any] | None = None) -> tuple[int, dict[str, Any]]:
        """Get a path, or post a body to it. Returns status and document.

        Raises NotReadyError where no server answers in time.
        """
        timeout_s = _ANSWER_TIMEOUT_S if body is None else _CHANGE_TIMEOUT_S
        connection = http.client.HTTPConnection(self.host, self.port, timeout=timeout_s)
        try:
            if body is None:
                connection.request("GET", path)
            else:
                headers = {"Content-Type": "application/json"}
                connection.request("POST", path, json.dumps(body), headers)
            answer = connection.getresponse()
            document = self._parse(answer.read())
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise NotReadyError(
                f"no {self.server} answers {self.place}: {error}",
                reason="NoServer",
                remedy=f"start it first, and look at its {self.options}",
            ) from error
        finally:
            connection.close()
        return answer.status, document if isinstance(document, dict) else {}

    def expect(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """Return the document of an answer 200. Raises as `ask`; FailedError for any other."""
        status, document = self.ask(path, body)
        if status != OK:
            why = reason_in(document) or status
            raise FailedError(
                f"the {self.server} {self.place} refused {path}: {why}",
                reason=self.refused,
                remedy=self.remedy,
            )
        return document

    def _parse(self, text: bytes) -> Any:
        try:
            return json.loads(text or b"{}")
        except ValueError:
            if self.may_answer_text:
                return {}
            raise


def reason_in(document: dict[str, Any]) -> str:
    """Return what an answer says went wrong; empty where it says nothing."""
    return str(document.get("error") or document.get("reason") or document.get("detail") or "")
