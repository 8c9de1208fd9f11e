"""A vLLM command line: the options that bear on its host memory, found and replaced.

Reads what vLLM's parser accepts (vllm/utils/argparse_utils.py, vllm/engine/arg_utils.py, 0.33):
underscores for dashes in long names, `--name=value`, `--name.key value` for keys of a JSON
option, `key+` for items of a list, and numbers such as 80g or 80G in either.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass

from hostprep.errors import BadInputError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

__all__ = ["CONFIG", "CommandLine", "Given", "human_number", "parse_config", "read_command"]

CONFIG = "--kv-transfer-config"

_SHORT = {
    "-dp": "--data-parallel-size",
    "-dpl": "--data-parallel-size-local",
    "-dpn": "--data-parallel-rank",
    "-dpr": "--data-parallel-start-rank",
    "-dpb": "--data-parallel-backend",
    "-dph": "--data-parallel-hybrid-lb",
    "-dpe": "--data-parallel-external-lb",
    "-dpm": "--data-parallel-multi-port-external-lb",
    "-n": "--nnodes",
    "-r": "--node-rank",
    "-tp": "--tensor-parallel-size",
    "-pp": "--pipeline-parallel-size",
    "-pcp": "--prefill-context-parallel-size",
}
_FLAGS = (
    "--data-parallel-hybrid-lb",
    "--data-parallel-external-lb",
    "--data-parallel-multi-port-external-lb",
)
_LONG = frozenset(
    (
        CONFIG,
        "--kv-offloading-size",
        "--kv-offloading-backend",
        "--distributed-executor-backend",
        "--config",
        "--device-ids",
        *_SHORT.values(),
    )
)
_SHORTEST = 6
"""argparse takes beginnings of long names; none of ours is unambiguous in fewer characters."""
_CLIENTS = ("chat", "complete", "collect-env")
_NUMBER = re.compile(r"(?P<number>\d+(?:\.\d+)?)(?P<suffix>[kKmMgGtT])", re.ASCII)
_STRING_OR_NUMBER = re.compile(r'"(?:[^"\\]|\\.)*"|\b\d+(?:\.\d+)?[kKmMgGtT]\b', re.ASCII)
_POWERS = "kmgt"


@dataclass(frozen=True)
class Given:
    """An option as it was given: where, and what."""

    name: str
    """Its long name."""
    key: str
    """What follows the first dot of a JSON option's name; else empty."""
    text: str | None
    """None for a flag."""
    begin: int
    end: int
    """Which of the command's words it takes, from `begin` up to but not including `end`."""


@dataclass(frozen=True)
class CommandLine:
    """A command that starts vLLM."""

    words: tuple[str, ...]
    program: str
    """The script `vllm`, or the Python that runs its module."""
    end: int
    """Where an option can be added: at the end, or before a `--`."""
    given: tuple[Given, ...]

    def all(self, name: str) -> tuple[Given, ...]:
        """Return every mention of an option."""
        return tuple(option for option in self.given if option.name == name)

    def last(self, name: str) -> str | None:
        """Return what an option says; the last one counts, as in argparse. None: not given."""
        found = self.all(name)
        return found[-1].text if found else None

    def has(self, name: str) -> bool:
        """Tell whether an option, or a flag, is given."""
        return bool(self.all(name))

    def number(self, name: str) -> int | None:
        """Return a whole number that an option gives. Raises BadInputError for another text."""
        text = self.last(name)
        if text is None:
            return None
        try:
            return int(text)
        except ValueError:
            raise BadInputError(
                f"{name} {text!r} is no whole number", reason="BadCommand"
            ) from None

    def with_config(self, config: dict[str, Any]) -> tuple[str, ...]:
        """Return the words with --kv-transfer-config as this, in the place of what was given."""
        new = (CONFIG, json.dumps(config))
        old = self.all(CONFIG)
        if not old:
            return (*self.words[: self.end], *new, *self.words[self.end :])
        words: list[str] = []
        position = 0
        for option in old:
            words += self.words[position : option.begin]
            if option is old[0]:
                words += new
            position = option.end
        return (*words, *self.words[position:])


def read_command(words: Sequence[str]) -> CommandLine:
    """Find vLLM and its options. Raises BadInputError where options could not be added."""
    words = tuple(words)
    program, begin = _begin(words)
    if not program or (begin < len(words) and words[begin] in _CLIENTS):
        raise BadInputError(
            "the command does not start a vLLM server: " + " ".join(words[:4]),
            reason="BadCommand",
            remedy="put `hostprep exec` right before `vllm serve`, inside of your script if there "
            "is one: options are added to that command line",
        )
    end = len(words)
    if "--" in words[begin:]:
        end = words.index("--", begin)
    return CommandLine(words, program, end, tuple(_options(words, begin, end)))


def _begin(words: tuple[str, ...]) -> tuple[str, int]:
    """Return vLLM's program and the index of the first word after it; "" where there is none."""
    for index, word in enumerate(words):
        module = words[index + 1] if word == "-m" and index + 1 < len(words) else ""
        if module == "vllm" or module.startswith("vllm."):
            python = [before for before in words[:index] if not before.startswith("-")]
            return (python or [""])[-1], index + 2
        if os.path.basename(word) == "vllm":
            return word, index + 1
    return "", 0


def _options(words: tuple[str, ...], begin: int, end: int) -> list[Given]:
    found = []
    index = begin
    while index < end:
        name, key, text = _split(words[index])
        after = index + 1
        if name in _LONG:
            if text is None and name not in _FLAGS:
                if after == end:
                    raise BadInputError(f"{words[index]} has no value", reason="BadCommand")
                text = words[after]
                after += 1
            found.append(Given(name, key, text, index, after))
        index = after
    return found


def _split(word: str) -> tuple[str, str, str | None]:
    """Return an option's long name, the key after a dot, and the value after `=`."""
    name, equals, text = word.partition("=")
    name, _, key = name.partition(".")
    name = _SHORT.get(name, name)
    if name.startswith("--"):
        name = name.replace("_", "-")
        whole = [long for long in _LONG if long.startswith(name)]
        if len(name) >= _SHORTEST and whole and name not in _LONG:
            raise BadInputError(
                f"{name} is short for {' or '.join(sorted(whole))}",
                reason="BadCommand",
                remedy="write it out, for us to see it as vLLM will",
            )
    return name, key, text if equals else None


def parse_config(line: CommandLine) -> dict[str, Any]:
    """Return the JSON that --kv-transfer-config gives in either spelling; {} if not given.

    Raises BadInputError for what is no JSON object, and for the option given twice.
    """
    given = line.all(CONFIG)
    whole = [option for option in given if not option.key]
    if len(whole) > 1 or (whole and len(given) > 1):
        raise BadInputError(
            f"{CONFIG} is given {'in two spellings' if len(whole) == 1 else 'twice'}",
            reason="BadCommand",
            remedy="vLLM takes the last and forgets the other: give one",
        )
    if whole:
        return _object(whole[0].text or "")
    config: dict[str, Any] = {}
    for option in given:
        _set(config, option)
    return config


def _object(text: str) -> dict[str, Any]:
    try:
        found = json.loads(_STRING_OR_NUMBER.sub(_plain_number, text))
    except ValueError as error:
        raise BadInputError(
            f"{CONFIG} is no JSON: {error}", reason="BadCommand", remedy="check its quotes"
        ) from error
    if not isinstance(found, dict):
        raise BadInputError(f"{CONFIG} is no JSON object", reason="BadCommand")
    return found


def _plain_number(match: re.Match[str]) -> str:
    text = match.group()
    return text if text.startswith('"') else str(human_number(text))


def human_number(text: str) -> int:
    """Return the value of 80, 80k (thousands) or 80K (1024s). Raises ValueError."""
    match = _NUMBER.fullmatch(text.strip())
    if match is None:
        return int(text)
    suffix = match["suffix"]
    power = _POWERS.index(suffix.lower()) + 1
    if suffix.islower():
        return int(float(match["number"]) * 1000**power)
    return int(match["number"]) << (10 * power)


def _set(config: dict[str, Any], option: Given) -> None:
    """Set the key of a `--kv-transfer-config.key` option, as vLLM merges them."""
    key, text = option.key, option.text or ""
    found: Any
    if key.endswith("+"):
        key, found = key[:-1], text.split(",")
    else:
        found = _value(text)
    *folders, name = key.split(".")
    for folder in folders:
        inner = config.setdefault(folder, {})
        if not isinstance(inner, dict):
            raise BadInputError(
                f"{CONFIG}.{key} goes below {folder}, which is no object", reason="BadCommand"
            )
        config = inner
    before = config.get(name)
    both_lists = isinstance(before, list) and isinstance(found, list)
    config[name] = before + found if both_lists else found


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        pass
    try:
        return human_number(text)
    except ValueError:
        return text
