"""What our identities may and may not do: one table, tried by a test and printed in the docs.

`python -m tests.support.rights` writes it into docs/security.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

import yaml

from testbed.api import MERGE_PATCH, STRATEGIC_PATCH, Api, Reply

PAGE = Path(__file__).parents[2] / "docs" / "security.md"
_BEGIN, _END = "<!-- rights: made by tests/support/rights.py -->\n", "<!-- end of rights -->"
_TABLE = yaml.safe_load((Path(__file__).parent / "rights.yaml").read_text(encoding="utf-8"))
IDENTITIES: dict[str, str] = _TABLE["identities"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Act:
    """One request as one identity."""

    who: str
    """A key of IDENTITIES."""
    what: str
    method: str
    path: str
    body: Any
    policy: bool
    """Refused by the admission policy; else by the lack of a right."""

    @property
    def title(self) -> str:
        """For a list of tests."""
        return f"{self.who}: {self.what}"


def _acts(rows: list[dict[str, Any]]) -> tuple[Act, ...]:
    acts = []
    for row in rows:
        method, _, path = row["do"].partition(" ")
        acts.append(
            Act(
                who=row["who"],
                what=row["what"],
                method=method,
                path=path.format(**_TABLE["paths"]),
                body=_TABLE["bodies"][row["body"]] if "body" in row else None,
                policy=row.get("policy", False),
            )
        )
    return tuple(acts)


FORBIDDEN = _acts(_TABLE["forbidden"])
PERMITTED = _acts(_TABLE["permitted"])


def try_it(api: Api, act: Act) -> Reply:
    """Send the request as whoever `api` is; nothing is stored."""
    path, _, query = act.path.partition("?")
    options = dict(parse_qsl(query))
    if act.method == "GET":
        return api.request("GET", path, query=options)
    body, content = act.body, "application/json"
    if act.method == "PATCH":
        # Built-in kinds alone have strategic merge, which knows conditions by their type.
        content = STRATEGIC_PATCH if path.startswith("/api/v1/") else MERGE_PATCH
    elif act.method == "PUT":
        body = {**body, "metadata": {**body["metadata"], **_version(api, path)}}
    return api.request(act.method, path, body, content_type=content, query={"dryRun": "All"})


def _version(api: Api, path: str) -> dict[str, str]:
    found = api.get(path.removesuffix("/status"))["metadata"]
    return {"resourceVersion": found["resourceVersion"]}


def _documented() -> str:
    lines = ["| who | may not | refused by |", "|---|---|---|"]
    for act in FORBIDDEN:
        by = "admission policy" if act.policy else "roles"
        lines.append(f"| {IDENTITIES[act.who]} | {act.what} | {by} |")
    lines += ["", "| who | may |", "|---|---|"]
    lines += [f"| {IDENTITIES[act.who]} | {act.what} |" for act in PERMITTED]
    return "\n".join(lines) + "\n"


def security_page(old: str) -> str:
    """Return docs/security.md with its tables made anew. Raises ValueError without the marks."""
    head, begin, rest = old.partition(_BEGIN)
    _, end, tail = rest.partition(_END)
    if not begin or not end:
        raise ValueError(f"docs/security.md lacks {_BEGIN.strip()!r} or {_END!r}")
    return head + begin + _documented() + end + tail


if __name__ == "__main__":
    PAGE.write_text(security_page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
