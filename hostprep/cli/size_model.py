"""MODEL of `hostprep size`: a file, a folder, a name in the local hub cache, or standard input.

Nothing is downloaded. Links are followed, for the hub cache is made of them; what is read must be
a regular file of a bounded size.
"""

from __future__ import annotations

import os
import re
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from hostprep.api.schema import pool_schema
from hostprep.errors import BadInputError
from hostprep.sizing.config import MAX_CONFIG_BYTES
from hostprep.sizing.weights import (
    MAX_HEADER_BYTES,
    MAX_INDEX_BYTES,
    Tensor,
    read_header,
    read_index,
)
from hostprep.units import format_bytes

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
_QUANTIZATION = "hf_quant_config.json"
"""ModelOpt writes it beside config.json."""
_MAX_NAME_CHARS: int = pool_schema("spec.sizing.model")["maxLength"]
_MOST_FILES = 4096
_HUB_FOLDER = re.compile(
    r"models--(?P<owner>[\w.-]+?)--(?P<name>[\w.-]+)|models--(?P<only>[\w.-]+)"
)
_HUB_NAME = re.compile(r"(?:[A-Za-z0-9][\w.-]*/)?[A-Za-z0-9][\w.-]*", re.ASCII)
_REVISION = re.compile(r"[A-Za-z0-9][\w.-]{0,127}", re.ASCII)
_PART = re.compile(
    r"(?P<stem>.+)-(?P<number>[0-9]{5,9})-of-(?P<count>[0-9]{5,9})\.safetensors", re.ASCII
)
_OTHER_FORMATS = {"params.json": "Mistral's own format", "model_index.json": "a diffusion pipeline"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFiles:
    """One model as it lies on disk."""

    source: str
    """Names config.json in messages."""
    name: str
    config: bytes
    quantization: bytes | None = None
    """hf_quant_config.json, where there is one."""
    folder: Path | None = None
    """Where the weights may lie."""


def find_model(text: str) -> ModelFiles:
    """Read what MODEL names. Raises BadInputError with the next step."""
    if text == "-":
        return ModelFiles(source="standard input", name="model", config=_standard_input())
    path = Path(text)
    if not text or not os.path.lexists(path):
        if _is_name(text):
            return _of_folder(_in_hub_cache(text), shown=text)
        raise _cannot_read(text, "No such file or directory")
    if os.path.isdir(path):
        return _of_folder(path, shown=text)
    folder = path.parent if path.name == CONFIG else None
    return ModelFiles(
        source=text,
        name=model_name(path),
        config=_read(path, MAX_CONFIG_BYTES),
        quantization=_beside(folder, _QUANTIZATION),
        folder=folder,
    )


def _is_name(text: str) -> bool:
    """Whether it can be a model's name on the hub, and does not look like a file's."""
    return _HUB_NAME.fullmatch(text) is not None and not text.lower().endswith(
        (".json", ".yaml", ".yml", ".gguf", ".safetensors", ".bin")
    )


def _standard_input() -> bytes:
    if sys.stdin is None:  # as Python has it where the descriptor was closed
        raise _cannot_read("standard input", "it is closed")
    try:
        data = sys.stdin.buffer.read(MAX_CONFIG_BYTES + 1)
    except OSError as error:
        raise _cannot_read("standard input", error.strerror) from error
    if not data:
        raise BadInputError(
            "standard input is empty", remedy="hostprep size - < config.json, or name a folder"
        )
    return data


def _of_folder(folder: Path, *, shown: str) -> ModelFiles:
    found = _snapshot(folder, shown) if os.path.isdir(folder / "snapshots") else folder
    path = found / CONFIG
    if not os.path.lexists(path):
        raise _no_config(found, shown)
    return ModelFiles(
        source=str(path),
        name=model_name(path),
        config=_read(path, MAX_CONFIG_BYTES),
        quantization=_beside(found, _QUANTIZATION),
        folder=found,
    )


def _no_config(folder: Path, shown: str) -> BadInputError:
    names = set(_names(folder))
    models = sorted(name for name in names if name.startswith("models--"))
    if models:
        return BadInputError(
            f"{shown}: is a hub cache with {len(models)} models",
            remedy=f"name one, such as {_hub_name(models[0])} or {folder / models[0]}",
        )
    for name, what in _OTHER_FORMATS.items():
        if name in names:
            return BadInputError(
                f"{shown}: holds {name}, {what}, and no {CONFIG}",
                remedy=f"give the {CONFIG} of the same model from the hub",
            )
    if any(name.endswith(".gguf") for name in names):
        return BadInputError(
            f"{shown}: holds a GGUF file and no {CONFIG}",
            remedy=f"give the {CONFIG} of the model that it was made from",
        )
    return BadInputError(f"{shown}: holds no {CONFIG}", remedy="give a model's folder or file")


def _snapshot(folder: Path, shown: str) -> Path:
    """Return the snapshot that `main` means, or the only one."""
    ref = folder / "refs" / "main"
    if os.path.lexists(ref):
        revision = _read(ref, 256).decode("utf-8", "replace").strip()
        if not _REVISION.fullmatch(revision):
            raise BadInputError(
                f"{ref}: names no revision", remedy=f"give a folder of {folder / 'snapshots'}"
            )
        if os.path.isdir(folder / "snapshots" / revision):
            return folder / "snapshots" / revision
    revisions = sorted(_names(folder / "snapshots"))
    if len(revisions) == 1:
        return folder / "snapshots" / revisions[0]
    raise BadInputError(
        f"{shown}: has {len(revisions)} snapshots, and refs/main names none of them",
        remedy=f"give one of the folders in {folder / 'snapshots'}",
    )


def _hub_cache() -> Path:
    """Return the folder of the hub cache: huggingface_hub's rules, constants.py."""
    environment = os.environ
    for key in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if environment.get(key):
            return Path(environment[key]).expanduser()
    if environment.get("HF_HOME"):
        return Path(environment["HF_HOME"]).expanduser() / "hub"
    base = environment.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "huggingface" / "hub"


def _in_hub_cache(name: str) -> Path:
    cache = _hub_cache()
    folder = cache / f"models--{name.replace('/', '--')}"
    if not os.path.isdir(folder):
        whole = name if "/" in name else f"ORG/{name}"
        raise BadInputError(
            f"{name}: is no file or folder here, and not in the hub cache {cache}",
            reason="NoSuchModel",
            remedy=f"hf download {whole} --include '*.json', or give the model's folder; "
            "HF_HUB_CACHE and HF_HOME say where the cache is",
        )
    return folder


def _hub_name(folder: str) -> str | None:
    """Return `meta-llama/Llama-3.1-8B` of the folder's name in a hub cache; None if it is none."""
    match = _HUB_FOLDER.fullmatch(folder)
    if match is None:
        return None
    return match["only"] or f"{match['owner']}/{match['name']}"


def model_name(path: Path) -> str:
    """Return a model's name: its file's, or its folder's where every model's file is config.json.

    In a hub cache the model's name there. Links are not followed: in the cache they lead to a file
    that is named by its hash.
    """
    whole = Path(os.path.abspath(path))
    name = whole.stem
    if whole.stem == "config" and whole.parent.name:
        name = whole.parent.name
        if whole.parent.parent.name == "snapshots":
            name = _hub_name(whole.parent.parent.parent.name) or name
    return "".join(char if char.isprintable() else "?" for char in name)[:_MAX_NAME_CHARS]


def find_tensors(folder: Path) -> tuple[tuple[Tensor, ...] | None, int | None, str]:
    """Return the tensors of a folder's weights, or at least their sum, and where that is from.

    The safetensors files' headers where all of them are there, else the sum of their index.
    None twice where there is neither. Raises BadInputError for files that are damaged.
    """
    index_path, total = folder / INDEX, None
    files: tuple[str, ...]
    if os.path.lexists(index_path):
        index = read_index(_read(index_path, MAX_INDEX_BYTES), source=str(index_path))
        total, files = index.total_bytes, index.files
    else:
        names = [name for name in _names(folder) if name.endswith(".safetensors")]
        # Mistral's repositories have the same weights twice, whole and in parts.
        plain = [name for name in names if not name.startswith(("consolidated", "adapter"))]
        files = _one_checkpoint(folder, sorted(plain or names))
    if files and len(files) <= _MOST_FILES and all(os.path.exists(folder / name) for name in files):
        tensors = tuple(tensor for name in files for tensor in _header(folder / name))
        return tensors, None, f"{len(files)} safetensors file{'' if len(files) == 1 else 's'}"
    return None, total, INDEX


def _one_checkpoint(folder: Path, names: list[str]) -> tuple[str, ...]:
    """Return the files that are one model's together.

    Raises BadInputError where parts are missing, or there is more than one model's.
    """
    parts: dict[tuple[str, str], set[int]] = {}
    for name in names:
        match = _PART.fullmatch(name)
        key = (name, "1") if match is None else (match["stem"], match["count"])
        parts.setdefault(key, set()).add(1 if match is None else int(match["number"]))
    if len(parts) > 1:
        raise BadInputError(
            f"{folder}: holds weights of more than one kind: {names[0]}, {names[-1]}",
            remedy="give a folder with one model's, or --weights",
        )
    for (stem, count), numbers in parts.items():
        if numbers != set(range(1, int(count) + 1)):
            raise BadInputError(
                f"{folder}: of the {int(count)} parts of {stem} it holds {len(numbers)}",
                remedy=f"download the others, or {INDEX}, or give --weights",
            )
    return tuple(names)


def _header(path: Path) -> tuple[Tensor, ...]:
    """Return the tensors that the file lists. Source: safetensors, format."""
    with _opened(path) as file:
        length = int.from_bytes(file.read(8), "little")
        size_bytes = os.fstat(file.fileno()).st_size
        if not 2 <= length <= min(MAX_HEADER_BYTES, max(0, size_bytes - 8)):
            raise BadInputError(
                f"{path}: is no safetensors file: its header would have {length} bytes",
                remedy="download it again, or give --weights",
            )
        header = file.read(length)
        return read_header(header, source=str(path), tensor_bytes=size_bytes - 8 - length)


def _names(folder: Path) -> Iterator[str]:
    try:
        with os.scandir(folder) as entries:
            for count, entry in enumerate(entries):
                if count >= _MOST_FILES * 4:
                    return
                yield entry.name
    except OSError as error:
        raise _cannot_read(folder, error.strerror) from error


def _beside(folder: Path | None, name: str) -> bytes | None:
    if folder is None or not os.path.lexists(folder / name):
        return None
    return _read(folder / name, MAX_CONFIG_BYTES)


def _read(path: Path, most_bytes: int) -> bytes:
    """Return a regular file's bytes. Raises BadInputError for more than that, or anything else."""
    with _opened(path) as file:
        data = file.read(most_bytes + 1)
    if len(data) > most_bytes:
        raise BadInputError(
            f"{path}: is larger than {format_bytes(most_bytes)}",
            remedy=f"give a model's {CONFIG}, not its weights or tokenizer",
        )
    return data


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    """Open a regular file, and report it where it cannot be read.

    A pipe's writer is not waited for: it is refused.
    """
    with _regular_file(path) as file:
        try:
            yield file
        except OSError as error:
            raise _cannot_read(path, error.strerror) from error


def _regular_file(path: Path) -> BinaryIO:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise _cannot_read(path, error.strerror) from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise _cannot_read(path, "it is no regular file; - reads standard input")
    return os.fdopen(descriptor, "rb")


def _cannot_read(path: Path | str, why: str | None) -> BadInputError:
    return BadInputError(
        f"cannot read {path}: {why}",
        remedy=f"name a {CONFIG}, a model's folder, or a model of the local hub cache",
    )
