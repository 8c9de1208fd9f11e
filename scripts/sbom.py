"""List what is in the image, as CycloneDX JSON: `make sbom`.

Made of what the image is built from: the pinned packages (requirements-image.lock) and the base
image (Containerfile). It holds no time and no machine's name: the same sources give the same file.
"""

# ruff: noqa: INP001  scripts are no package
from __future__ import annotations

import json
import re
import sys
import tomllib
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

ROOT = Path(__file__).parents[1]
_PIN = re.compile(r"^([a-z0-9][a-z0-9._-]*)==(\S+)")
_VIA = re.compile(r"^    # +(?:via(?: +|$))?(.*)$")
_BASE = re.compile(r"^ARG BASE=(\S+/)([^/:@\s]+):([^@\s]+)@sha256:([0-9a-f]{64})$", re.MULTILINE)
_NAMESPACE = uuid.UUID("b41d0d1c-3b52-4f0a-9d53-6d4f1c3a8c55")
"""Of our serial numbers; any constant does."""


@dataclass(slots=True)
class Package:
    """A pinned package."""

    name: str
    version: str
    wanted_by: list[str] = field(default_factory=list)
    """Packages that require it; our own project among them."""

    @property
    def purl(self) -> str:
        """Package URL."""
        return f"pkg:pypi/{self.name}@{quote(self.version)}"


def packages_of(lock: str) -> list[Package]:
    """Return the packages of a lock that pip-compile wrote."""
    packages: list[Package] = []
    for line in lock.splitlines():
        if pin := _PIN.match(line):
            packages.append(Package(pin[1], pin[2]))
        elif packages and (via := _VIA.match(line)) and via[1] and not via[1].startswith("-c "):
            # "name", or "name (pyproject.toml)" for what the project itself requires.
            packages[-1].wanted_by.append(via[1].split()[0])
    return packages


def bill_of_materials(root: Path) -> dict[str, Any]:
    """Return the document. Raises ValueError where the base image has no digest."""
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    packages = packages_of((root / "requirements-image.lock").read_text(encoding="utf-8"))
    own = {
        "type": "application",
        "bom-ref": f"pkg:generic/{project['name']}@{project['version']}",
        "name": project["name"],
        "version": project["version"],
        "description": project["description"],
        "licenses": [{"license": {"id": "Apache-2.0"}}],
        "purl": f"pkg:generic/{project['name']}@{project['version']}",
    }
    base = _base_image((root / "Containerfile").read_text(encoding="utf-8"))
    components = [base, *(_library(package) for package in packages)]
    document = {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": own, "lifecycles": [{"phase": "build"}]},
        "components": components,
        "dependencies": list(_dependencies(own, base, packages)),
    }
    content = json.dumps(document, sort_keys=True)
    return {**document, "serialNumber": f"urn:uuid:{uuid.uuid5(_NAMESPACE, content)}"}


def _base_image(containerfile: str) -> dict[str, Any]:
    found = _BASE.search(containerfile)
    if found is None:
        raise ValueError("the Containerfile names no base image by digest; run make base-image")
    folder, name, tag, digest = found.groups()
    where = f"repository_url={quote(folder + name, safe='/:')}&tag={quote(tag)}"
    purl = f"pkg:oci/{name}@sha256%3A{digest}?{where}"
    return {
        "type": "container",
        "bom-ref": purl,
        "name": f"{folder}{name}",
        "version": tag,
        "hashes": [{"alg": "SHA-256", "content": digest}],
        "purl": purl,
    }


def _library(package: Package) -> dict[str, Any]:
    return {
        "type": "library",
        "bom-ref": package.purl,
        "name": package.name,
        "version": package.version,
        "purl": package.purl,
    }


def _dependencies(
    own: dict[str, Any], base: dict[str, Any], packages: list[Package]
) -> Iterator[dict[str, Any]]:
    """Yield what each component requires, turning round what the lock says."""
    refs = {package.name: package.purl for package in packages} | {own["name"]: own["bom-ref"]}
    required: dict[str, list[str]] = {ref: [] for ref in refs.values()}
    for package in packages:
        for name in package.wanted_by:
            required[refs[name]].append(package.purl)
    required[own["bom-ref"]].insert(0, base["bom-ref"])
    for ref, wanted in required.items():
        yield {"ref": ref, "dependsOn": wanted}


def main(arguments: list[str], root: Path = ROOT) -> int:
    """Write the document to the file that is named, or to standard output. Returns 0, or 1."""
    try:
        document = bill_of_materials(root)
    except ValueError as error:
        sys.stderr.write(f"sbom: {error}\n")
        return 1
    text = json.dumps(document, indent=2) + "\n"
    if not arguments:
        sys.stdout.write(text)
        return 0
    path = Path(arguments[0])
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    sys.stdout.write(f"sbom: {path}: {len(document['components'])} components\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
