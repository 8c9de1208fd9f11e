"""A vLLM command line: the options that concern its host memory, found and replaced, and its ranks.

Reads what vLLM's parser accepts (vllm/utils/argparse_utils.py, vllm/engine/arg_utils.py, 0.33):
underscores for dashes in long names, `--name=value`, `--name.key value` for keys of a JSON
option, `key+` for items of a list, and numbers such as 80g or 80G in either.

Each data-parallel rank is an engine of its own (vllm/engine/arg_utils.py create_engine_config,
vllm/v1/engine/core.py run_engine_core): its engine_id gets the suffix `_dpRANK`, by its number in
the whole deployment.
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

CONFIG = "--kv-transfer-config"

_SIZE = "--data-parallel-size"
_LOCAL = "--data-parallel-size-local"
_RANK = "--data-parallel-rank"
_START = "--data-parallel-start-rank"
_FLAGS = {
    "-dph": "--data-parallel-hybrid-lb",
    "-dpe": "--data-parallel-external-lb",
    "-dpm": "--data-parallel-multi-port-external-lb",
}
_SHORT = {
    **_FLAGS,
    "-dp": _SIZE,
    "-dpl": _LOCAL,
    "-dpn": _RANK,
    "-dpr": _START,
    "-dpb": "--data-parallel-backend",
    "-n": "--nnodes",
    "-r": "--node-rank",
    "-tp": "--tensor-parallel-size",
    "-pp": "--pipeline-parallel-size",
    "-pcp": "--prefill-context-parallel-size",
}
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
_MAX_RANKS = 1024
"""More ranks than any node has: a slip of the hand."""


@dataclass(frozen=True)
class GivenOption:
    """An option of the command: where it stands, and its value."""

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
    given: tuple[GivenOption, ...]

    def all(self, name: str) -> tuple[GivenOption, ...]:
        """Return every mention of an option."""
        return tuple(option for option in self.given if option.name == name)

    def last(self, name: str) -> str | None:
        """Return an option's value; the last one counts, as in argparse. None: not given."""
        found = self.all(name)
        return found[-1].text if found else None

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
        """Return the words with this --kv-transfer-config, in place of one that was given."""
        old = self.all(CONFIG)
        at = old[0].begin if old else self.end
        replaced = {index for option in old for index in range(option.begin, option.end)}
        rest = (self.words[index] for index in range(at, len(self.words)) if index not in replaced)
        return (*self.words[:at], CONFIG, json.dumps(config), *rest)


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


def _options(words: tuple[str, ...], begin: int, end: int) -> list[GivenOption]:
    found = []
    index = begin
    while index < end:
        name, key, text = _split(words[index])
        after = index + 1
        if name in _LONG:
            if text is None and name not in _FLAGS.values():
                if after == end:
                    raise BadInputError(f"{words[index]} has no value", reason="BadCommand")
                text = words[after]
                after += 1
            found.append(GivenOption(name, key, text, index, after))
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
                remedy="write it out: only whole names are read here",
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
            remedy="vLLM takes the last and ignores the other: give one",
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


def _set(config: dict[str, Any], option: GivenOption) -> None:
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


@dataclass(frozen=True)
class Ranks:
    """The data-parallel ranks of this node."""

    numbers: tuple[int, ...]
    is_parallel: bool
    """Whether vLLM adds a suffix to their engine_id."""

    def engine_ids(self, engine_id: str) -> tuple[str, ...]:
        """Return each rank's engine_id, as vLLM makes it."""
        if not self.is_parallel:
            return (engine_id,)
        return tuple(f"{engine_id}_dp{number}" for number in self.numbers)


def local_ranks(line: CommandLine) -> Ranks:
    """Return which ranks the command starts on this node.

    Raises BadInputError where only the other nodes could say, or Ray starts them elsewhere.
    """
    size = _count(line, _SIZE)
    rank, start = line.number(_RANK), line.number(_START)
    for option, number in ((_RANK, rank), (_START, start)):
        if number is not None and number < 0:
            raise BadInputError(f"{option} {number} is negative", reason="BadCommand")
    if line.last("--data-parallel-backend") == "ray":
        raise BadInputError(
            "--data-parallel-backend ray has Ray start the ranks, outside of this command",
            reason="BadCommand",
            remedy="use the backend mp, or `hostprep exec` for each rank with --data-parallel-rank",
        )
    if rank is not None:
        return Ranks((rank,), is_parallel=size > 1 or rank > 0)
    local = line.number(_LOCAL)
    _check_known(line, size, local, start)
    first, count = (0, size) if local is None else (start or 0, _count(line, _LOCAL))
    return Ranks(tuple(range(first, first + count)), is_parallel=size > 1 or first > 0)


def worker_count(line: CommandLine) -> int:
    """Return how many processes with a GPU each data-parallel rank has, on all its nodes."""
    count = 1
    for kind in ("tensor", "pipeline", "prefill-context"):
        count *= max(1, line.number(f"--{kind}-parallel-size") or 1)
    return count


def local_worker_count(line: CommandLine) -> int:
    """Return how many of them are on this node, where a rank may span several.

    vllm/config/parallel.py, local_world_size and nnodes_within_dp. Raises as `local_ranks` does.
    """
    groups = max(1, _count(line, _SIZE) // len(local_ranks(line).numbers))
    nodes = max(1, (line.number("--nnodes") or 1) // groups)
    return max(1, worker_count(line) // nodes)


def _check_known(line: CommandLine, size: int, local: int | None, start: int | None) -> None:
    """Refuse what vLLM would derive from the number of this node among the others."""
    nodes = max(line.number("--nnodes") or 1, (line.number("--node-rank") or 0) + 1)
    external = bool(line.all("--data-parallel-external-lb"))
    derived = nodes > 1 and (local is None or start is None)
    ignored = start is not None and local is None  # vLLM takes it with the other one only
    if size > 1 and (derived or external or ignored):
        raise BadInputError(
            "which data-parallel ranks run on this node is for vLLM to find out",
            reason="BadCommand",
            remedy=f"say it: {_LOCAL} and {_START}, or {_RANK}",
        )
    if local == 0:
        raise BadInputError(
            f"{_LOCAL} 0 runs no engine on this node, so there is nothing to claim for",
            reason="BadCommand",
            remedy="leave `hostprep exec` out here",
        )


def _count(line: CommandLine, option: str) -> int:
    number = line.number(option)
    if number is None:
        return 1
    if not 1 <= number <= _MAX_RANKS:
        raise BadInputError(f"{option} {number} is not from 1 to {_MAX_RANKS}", reason="BadCommand")
    return number
