"""Segments of a Mooncake store by its service's REST interface; the standard library alone.

Paths and fields: mooncake/mooncake_store_service.py, 0.3.13.post1. A segment's file is named by
what it is called in /dev/shm: a link there leads to the region. The interface knows no
authentication and listens everywhere: keep it inside the pod.
"""

from __future__ import annotations

import http.client
import json

from hostprep.errors import FailedError, NotReadyError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_ANSWER_TIMEOUT_S = 10.0
_MOUNT_TIMEOUT_S = 600.0
"""Over RDMA, mounting registers the whole segment with the card before it answers."""
_OK = 200


class Service:
    """One running store service, on this machine."""

    def __init__(self, port: int) -> None:
        self._port = port

    def check(self) -> None:
        """Raise NotReadyError unless it answers."""
        self._ask("GET", "/", None, _ANSWER_TIMEOUT_S)

    def mount(self, name: str, size_bytes: int) -> list[str]:
        """Have it offer /dev/shm/`name` to the pool; returns the segment's ids.

        Raises NotReadyError where no store answers, FailedError where it refuses.
        """
        answer = self._expect("/api/mount_shm", {"name": name, "size": size_bytes})
        return [str(each) for each in answer["segment_ids"]]

    def unmount(self, segment_ids: list[str]) -> None:
        """Have it take segments away, with all that is stored in them. Raises as `mount` does."""
        self._expect("/api/unmount_shm", {"segment_ids": segment_ids})

    def _expect(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        status, document = self._ask("POST", path, json.dumps(body), _MOUNT_TIMEOUT_S)
        if status != _OK:
            raise FailedError(
                f"the Mooncake store on port {self._port} refused {path}: "
                f"{document.get('error') or status}",
                reason="StoreRefused",
                remedy="look at its log, and at its master's",
            )
        return document

    def _ask(
        self, method: str, path: str, body: str | None, timeout_s: float
    ) -> tuple[int, dict[str, Any]]:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=timeout_s)
        try:
            headers = {"Content-Type": "application/json"} if body else {}
            connection.request(method, path, body, headers)
            answer = connection.getresponse()
            text = answer.read()
        except (OSError, http.client.HTTPException) as error:
            raise NotReadyError(
                f"no Mooncake store answers on port {self._port}: {error}",
                reason="NoServer",
                remedy="start it first, and look at its --port",
            ) from error
        finally:
            connection.close()
        try:
            document = json.loads(text or b"{}")
        except ValueError:
            document = {}
        return answer.status, document if isinstance(document, dict) else {}
