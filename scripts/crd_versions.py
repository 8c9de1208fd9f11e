"""Make version v1alpha1 of the CustomResourceDefinitions from v1beta1, which is written by hand.

    python scripts/crd_versions.py [--check]

Both have one structure, so that nothing is converted. v1alpha1 is the one that is stored, and takes
the old spellings of a few choices as well.
"""

# ruff: noqa: INP001  scripts are no package
from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path

from hostprep.api.names import VERSION
from hostprep.api.versions import OLD_SPELLINGS, WRITTEN_VERSION

__all__ = ["derived", "main"]

CRDS = Path(__file__).resolve().parent.parent / "charts" / "hostprep" / "files" / "crds"
_MARK = (
    "    # From here on made by scripts/crd_versions.py, from the version above: change that one.\n"
)


def derived(text: str) -> str:
    """Return the file with v1alpha1 as it follows from v1beta1.

    Raises ValueError where v1beta1 is not the first version, or stored.
    """
    written = text.partition(_MARK)[0]
    head, begin, version = written.partition(f"    - name: {WRITTEN_VERSION}\n")
    if not begin or "  versions:\n" not in head or "      storage: false\n" not in version:
        raise ValueError(f"{WRITTEN_VERSION} is not the first version, or it is stored")
    version = version.replace("      storage: false\n", "      storage: true\n", 1)
    version = version.replace(f"/{WRITTEN_VERSION}", f"/{VERSION}")
    return f"{written}{_MARK}    - name: {VERSION}\n{_with_old_spellings(version)}"


def _with_old_spellings(version: str) -> str:
    for known in OLD_SPELLINGS.values():
        new, old = set(known.values()), ", ".join(known)

        def add(found: re.Match[str], new: set[str] = new, old: str = old) -> str:
            choices = found.group(1)
            return f"enum: [{choices}, {old}]" if set(choices.split(", ")) == new else found.group()

        version = re.sub(r"enum: \[([^]]*)\]", add, version)
    return version


def main(arguments: Sequence[str]) -> int:
    """Write the files, or with --check say whether they are up to date."""
    for path in sorted(CRDS.glob("*.yaml")):
        text = path.read_text(encoding="utf-8")
        made = derived(text)
        if made == text:
            continue
        if "--check" in arguments:
            sys.stderr.write(f"{path.name} is not up to date: run scripts/crd_versions.py\n")
            return 1
        path.write_text(made, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
