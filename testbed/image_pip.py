"""The caller's pip settings for a pip inside an image build, without a trace in the image.

They become one file that is mounted while the build runs, and so do the files and folders they
name. Build arguments and ENV would stay in the image's history, with any password in them.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

__all__ = ["PipSettings", "parse_settings", "settings_for_build"]

_FOR_DOWNLOADS = (
    "cert",
    "client-cert",
    "constraint",
    "extra-index-url",
    "find-links",
    "index-url",
    "no-index",
    "pre",
    "prefer-binary",
    "proxy",
    "retries",
    "timeout",
    "default-timeout",
    "trusted-host",
)
"""Where to download from and how. What says where to install to is no business of an image."""
_CA_VARIABLES = ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "SSL_CERT_FILE")
_CA_FILES = ("/etc/ssl/certs/ca-certificates.crt", "/etc/pki/tls/certs/ca-bundle.crt")


@dataclass(frozen=True, slots=True)
class PipSettings:
    """A pip.conf, and the paths that it names and that must be there beside it."""

    text: str
    paths: tuple[Path, ...]


def settings_for_build(environ: Mapping[str, str] = os.environ) -> PipSettings:
    """As this Python's pip sees them: files, then environment. Raises nothing; none are none."""
    done = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"],
        env={**environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    candidates = (*(environ.get(name, "") for name in _CA_VARIABLES), *_CA_FILES)
    authorities = next((path for path in candidates if path and os.path.isfile(path)), None)
    return parse_settings(done.stdout, authorities)


def parse_settings(listed: str, authorities: str | None) -> PipSettings:
    """Turn the words of `pip config list` into a pip.conf.

    `authorities`: the file of certificates to trust where the settings name none, since an image
    does not know those that the machine's owner added to the machine.
    """
    values: dict[tuple[str, str], str] = {}
    for line in listed.splitlines():
        name, _, quoted = line.partition("=")
        section, _, key = name.rpartition(".")
        if key in _FOR_DOWNLOADS and section in {"global", "install", "wheel", ":env:"}:
            values[section, key] = str(ast.literal_eval(quoted))
    for section, key in list(values):
        if section == ":env:":
            # As with pip itself, a variable wins over every section of every file.
            value = values[section, key]
            values = {names: v for names, v in values.items() if names[1] != key}
            values["global", key] = value
    if authorities and all(key != "cert" for _, key in values):
        values["global", "cert"] = authorities
    return PipSettings(_text(values), tuple(_paths(values)))


def _text(values: Mapping[tuple[str, str], str]) -> str:
    lines = []
    for section in sorted({section for section, _ in values}):
        lines.append(f"[{section}]")
        for (owner, key), value in sorted(values.items()):
            if owner == section:
                # A line of its own that starts with a blank continues the value before.
                words = value.split("\n") if "\n" in value else [value]
                lines.append(f"{key} = " + "\n    ".join(words))
    return "".join(f"{line}\n" for line in lines)


def _paths(values: Mapping[tuple[str, str], str]) -> list[Path]:
    words = {word.removeprefix("file://") for value in values.values() for word in value.split()}
    return sorted(Path(word) for word in words if word.startswith("/") and os.path.exists(word))
