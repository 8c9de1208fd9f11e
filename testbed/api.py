"""A small client for tests: raw JSON in and out, one connection a thread, no caching."""

from __future__ import annotations

import http.client
import json
import select
import ssl
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode, urlsplit

APPLY_PATCH = "application/apply-patch+yaml"
JSON_PATCH = "application/json-patch+json"
MERGE_PATCH = "application/merge-patch+json"
STRATEGIC_PATCH = "application/strategic-merge-patch+json"

JsonObject = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Reply:
    """What the server answered; `body` is parsed JSON, or text where it is none."""

    status: int
    headers: Mapping[str, str]
    body: Any


class ApiError(Exception):
    """The server refused: `status` is HTTP's, `reason` and `message` are Kubernetes's."""

    def __init__(self, reply: Reply) -> None:
        body = reply.body if isinstance(reply.body, dict) else {}
        self.status = reply.status
        self.reason: str = body.get("reason", "")
        self.message: str = body.get("message", str(reply.body))
        super().__init__(f"{self.status} {self.reason}: {self.message}")


class Api:
    """Requests as one user: by token, or by the client certificate in `context`."""

    def __init__(self, url: str, context: ssl.SSLContext, *, token: str | None = None) -> None:
        self._address = urlsplit(url).netloc
        self._context = context
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._local = threading.local()

    def request(
        self,
        method: str,
        path: str,
        body: object = None,
        *,
        content_type: str = "application/json",
        timeout_s: float = 30.0,
        query: Mapping[str, str] | None = None,
    ) -> Reply:
        """Ask once and return whatever the answer is; raises OSError when there is none."""
        data = None if body is None else json.dumps(body)
        headers = {**self._headers, "Accept": "application/json"}
        if data is not None:
            headers["Content-Type"] = content_type
        target = f"{path}?{urlencode(query)}" if query else path
        connection = self._connection(timeout_s)
        try:
            connection.request(method, target, data, headers)
            answer = connection.getresponse()
            content = answer.read()
        except (OSError, http.client.HTTPException) as error:
            self._drop()
            if isinstance(error, OSError):
                raise
            raise ConnectionError(str(error)) from error
        return Reply(answer.status, dict(answer.getheaders()), _parsed(content))

    def get(self, path: str, **query: str) -> JsonObject:
        """Read an object or a list; raises ApiError."""
        return self._wanted("GET", path, query=query)

    def create(self, path: str, body: JsonObject, **query: str) -> JsonObject:
        """POST to a collection; raises ApiError."""
        return self._wanted("POST", path, body, query=query)

    def replace(self, path: str, body: JsonObject, **query: str) -> JsonObject:
        """PUT an object; raises ApiError."""
        return self._wanted("PUT", path, body, query=query)

    def patch(
        self, path: str, body: object, *, content_type: str = MERGE_PATCH, **query: str
    ) -> JsonObject:
        """PATCH an object, by default with a merge patch; raises ApiError."""
        return self._wanted("PATCH", path, body, content_type=content_type, query=query)

    def delete(self, path: str, **query: str) -> bool:
        """Delete, with no grace period; False when it was not there; raises ApiError."""
        reply = self.request("DELETE", path, query={"gracePeriodSeconds": "0", **query})
        if reply.status == http.HTTPStatus.NOT_FOUND:
            return False
        if reply.status >= 300:
            raise ApiError(reply)
        return True

    def exists(self, path: str) -> bool:
        """Whether an object is there; raises ApiError when that cannot be said."""
        reply = self.request("GET", path)
        if reply.status not in {http.HTTPStatus.OK, http.HTTPStatus.NOT_FOUND}:
            raise ApiError(reply)
        return reply.status == http.HTTPStatus.OK

    def _wanted(self, method: str, path: str, body: object = None, **more: Any) -> JsonObject:
        reply = self.request(method, path, body, **more)
        if reply.status >= 300:
            raise ApiError(reply)
        parsed: JsonObject = reply.body
        return parsed

    def _connection(self, timeout_s: float) -> http.client.HTTPSConnection:
        connection: http.client.HTTPSConnection | None = getattr(self._local, "connection", None)
        if connection is None or _is_closed(connection):
            connection = http.client.HTTPSConnection(
                self._address, context=self._context, timeout=timeout_s
            )
            self._local.connection = connection
        elif connection.sock is not None:
            connection.sock.settimeout(timeout_s)
        return connection

    def _drop(self) -> None:
        self._local.connection.close()
        self._local.connection = None


def _is_closed(connection: http.client.HTTPSConnection) -> bool:
    # The server ends idle connections after 90 s, and all of them when it is killed: then there
    # is something to read (the end) before anything was asked.
    sock = connection.sock
    return sock is not None and bool(select.select([sock], [], [], 0)[0])


def _parsed(content: bytes) -> Any:
    try:
        return json.loads(content)
    except ValueError:
        return content.decode(errors="replace")
