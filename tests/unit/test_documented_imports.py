"""Every import and command that the docs name works, from an installed wheel and from the zipapp.

They are an interface: engines' configurations, users' scripts and images hold these names. Where a
module moves, the name that is listed here stays.
"""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
import zipfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from hostprep.node.apply.publish import build_zipapp
from testbed.machine import OLD_PYTHON

pytestmark = pytest.mark.unit

CHECKOUT = Path(__file__).parents[2]
REPORT = CHECKOUT / "tests" / "unit" / "import_report.py"

ENGINE_HALF = (
    "import hostprep; hostprep.__version__",
    "from hostprep import attach, attach_many, join, wait",
    "from hostprep import Attachment, HostprepError, Owner",
    "import hostprep; hostprep.attach; hostprep.attach_many; hostprep.join; hostprep.wait",
    "import hostprep; hostprep.Attachment; hostprep.HostprepError; hostprep.Owner",
    "import hostprep.attachment; hostprep.attach",  # examples/kubernetes/engine-scripts.yaml
    "from hostprep.errors import HostprepError, NotReadyError, BusyError",
    "from hostprep.errors import BadInputError, FailedError",
    "import hostprep, hostprep.errors as e; assert hostprep.HostprepError is e.HostprepError",
    "from hostprep.slots import REUSED, WRITE, Request, over",
    "from hostprep.slots import OUTSIDE, SHARED, STORED, ATTENTION, RECURRENT",
    "from hostprep.slots import Group, Layout, SlotPool, ShortageError",
    "from hostprep.slots import BatchClaim, Claim, Counts, GroupUsage, GroupUse",
    "from hostprep.slots import Directory, Missing, OverBudgetError, PartialMatch, Ticket",
    "from hostprep.slots import *; SlotPool(Layout(32, (Group('a', 4, 512),))).claim_batch([])",
    "from hostprep.register import register, Registration",
    "import hostprep.register; hostprep.register.register; hostprep.register.Registration",
    "from hostprep.register.board import RankBoard, board_path",
    "from hostprep.register.board import BoardReader, BoardView, RankView",
    "from hostprep.register.gate import Gate; Gate(1, deadline_s=900).report(0, 'Ready')",
    "from hostprep.register.cost import registration_cost",
    "import hostprep.engines",
    "import hostprep.engines.vllm",
    "import hostprep.engines.lmcache",
    "import hostprep.engines.lmcache.lend",
    "from hostprep.engines.mooncake.segments import mount",
    "from hostprep.engines.sglang.plugin import load",
)
"""What needs the standard library alone."""

PLUGINS = (
    "from hostprep.engines.vllm import HostprepOffloadingSpec",
    "from hostprep.engines.vllm import HostprepSimpleConnector",
    "from hostprep.engines.lmcache.pinning import HostprepDevice",
    "from hostprep.engines.lmcache.vllm_connector import HostprepLMCacheConnector",
)
"""What engines load by these very names, and what therefore needs the engine."""

NODE_HALF = (
    "from hostprep.boot import systemd_unit; systemd_unit('/etc/hostprep/kv.sh')",
    "import hostprep.boot; hostprep.boot.systemd_unit",
    "import hostprep.agent.worker",  # docs/control-plane.md: the worker's own process
)

MODULES = (
    ("-m", "hostprep.engines.lmcache", "--help"),
    ("-m", "hostprep.engines.lmcache.lend", "--help"),
)
PROGRAM = (
    ("-m", "hostprep", "exec", "--help"),
    ("-m", "hostprep", "attach", "--help"),
    ("-m", "hostprep", "wait", "--help"),
    ("-m", "hostprep", "engines"),
)
"""What `hostprep` does with the standard library alone; in the zipapp the file itself does it."""
NODE_COMMANDS = (
    ("-m", "hostprep", "--help"),
    ("-m", "hostprep", "boot", "--script", "--name", "kv", "--size", "64Mi"),
    ("-m", "hostprep_operator", "--help"),
)
ZIPAPP = "hostprep.pyz"
ZIPAPP_COMMANDS = (
    (ZIPAPP, "exec", "--help"),
    (ZIPAPP, "attach", "--help"),
    (ZIPAPP, "wait", "--help"),
    (ZIPAPP, "engines"),
    (ZIPAPP, "engines", "trtllm", "--connector", "lmcache", "--server", "tcp://127.0.0.1:5555"),
)
ENTRY_POINT = (
    "from importlib.metadata import distribution\n"
    "all_points = distribution('hostprep').entry_points\n"
    "[found] = [e for e in all_points if e.group == 'sglang.srt.plugins']\n"
    "assert (found.name, found.value) == ('hostprep', 'hostprep.engines.sglang.plugin:load')\n"
    "assert callable(found.load())"
)
PROGRAMS = (
    "from importlib.metadata import distribution\n"
    "for name in ('hostprep', 'hostprep-operator'):\n"
    "    [found] = [e for e in distribution('hostprep').entry_points if e.name == name"
    " and e.group == 'console_scripts']\n"
    "    assert callable(found.load())"
)


@pytest.fixture(scope="module")
def zipapp(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("root") / ZIPAPP
    path.write_bytes(build_zipapp())
    return path


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder that holds what a wheel of this checkout installs."""
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(build, cwd=CHECKOUT, check=True, capture_output=True, timeout=120)
    [file] = folder.glob("*.whl")
    with zipfile.ZipFile(file) as archive:
        archive.extractall(folder / "site-packages")
    return folder / "site-packages"


Reports = Callable[[str], dict[str, Any]]


@pytest.fixture(scope="module")
def report_of(zipapp: Path, wheel: Path) -> Reports:
    """Return what one process in each of the places found; each is started once."""
    isolated = ("-I", "-S")
    statements = [*ENGINE_HALF, *PLUGINS, ENTRY_POINT]
    commands = [*MODULES, *((str(zipapp), *words) for _, *words in ZIPAPP_COMMANDS)]
    asked: dict[str, tuple[str, tuple[str, ...], Path, list[str], list[Any]]] = {
        "zipapp": (sys.executable, isolated, zipapp, statements, commands),
        "zipapp-old": (OLD_PYTHON or "", isolated, zipapp, statements, commands),
        "wheel": (sys.executable, isolated, wheel, statements, [*MODULES, *PROGRAM]),
        "wheel-node": (
            sys.executable,
            ("-I",),
            wheel,
            [*NODE_HALF, PROGRAMS],
            list(NODE_COMMANDS),
        ),
    }

    @cache
    def report(place: str) -> dict[str, Any]:
        python, options, path, statements, commands = asked[place]
        done = subprocess.run(
            [python, *options, "-B", str(REPORT)],
            input=json.dumps({"path": str(path), "statements": statements, "commands": commands}),
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
            env={"PATH": "/usr/bin:/bin", "HOSTPREP_ROOT": "/nonexistent"},
        )
        assert done.returncode == 0, done.stderr
        found: dict[str, Any] = json.loads(done.stdout)
        elsewhere = {n: f for n, f in found["files"].items() if not f.startswith(f"{path}/")}
        assert not elsewhere, "modules of another hostprep were found"
        return found

    return report


# A new machine has no Python 3.9: there the syntax of what the zipapp carries is checked alone.
ZIPAPP_PLACES = ("zipapp", "zipapp-old") if OLD_PYTHON else ("zipapp",)
ENGINES_PLACES = ("wheel", *ZIPAPP_PLACES)


@pytest.mark.parametrize("place", ENGINES_PLACES)
@pytest.mark.parametrize("statement", ENGINE_HALF)
def test_the_import_works_without_any_library(
    report_of: Reports, place: str, statement: str
) -> None:
    assert report_of(place)["statements"][statement] == ""


@pytest.mark.parametrize("place", ENGINES_PLACES)
@pytest.mark.parametrize("statement", PLUGINS)
def test_a_plugin_is_found_and_misses_nothing_but_its_engine(
    report_of: Reports, place: str, statement: str
) -> None:
    missing = report_of(place)["statements"][statement]
    assert re.fullmatch(r"no module (vllm|torch|lmcache)(\..*)?", missing), missing


@pytest.mark.parametrize("place", ENGINES_PLACES)
def test_sglang_finds_its_plugin_by_the_metadata(report_of: Reports, place: str) -> None:
    assert report_of(place)["statements"][ENTRY_POINT] == ""


@pytest.mark.parametrize("place", ENGINES_PLACES)
@pytest.mark.parametrize("words", MODULES, ids=" ".join)
def test_the_module_runs_without_any_library(
    report_of: Reports, place: str, words: tuple[str, ...]
) -> None:
    code, output = report_of(place)["commands"][" ".join(words)]
    assert code in (0, None), output


@pytest.mark.parametrize("words", PROGRAM, ids=" ".join)
def test_the_program_runs_from_the_wheel_without_any_library(
    report_of: Reports, words: tuple[str, ...]
) -> None:
    code, output = report_of("wheel")["commands"][" ".join(words)]
    assert code in (0, None), output


@pytest.mark.parametrize("place", ZIPAPP_PLACES)
@pytest.mark.parametrize("words", ZIPAPP_COMMANDS, ids=" ".join)
def test_the_zipapp_runs_by_its_path(
    report_of: Reports, zipapp: Path, place: str, words: tuple[str, ...]
) -> None:
    text = " ".join((str(zipapp), *words[1:]))
    code, output = report_of(place)["commands"][text]
    assert code in (0, None), output


def test_the_zipapps_syntax_is_that_of_python_3_9(zipapp: Path) -> None:
    with zipfile.ZipFile(zipapp) as archive:
        names = [name for name in archive.namelist() if name.endswith(".py")]
        for name in names:
            ast.parse(archive.read(name), name, feature_version=(3, 9))
    assert "hostprep/client/attach.py" in names


@pytest.mark.parametrize("statement", [*NODE_HALF, PROGRAMS])
def test_the_node_halfs_import_works_from_the_wheel(report_of: Reports, statement: str) -> None:
    assert report_of("wheel-node")["statements"][statement] == ""


@pytest.mark.parametrize("words", NODE_COMMANDS, ids=" ".join)
def test_the_node_halfs_module_runs_from_the_wheel(
    report_of: Reports, words: tuple[str, ...]
) -> None:
    code, output = report_of("wheel-node")["commands"][" ".join(words)]
    assert code in (0, None), output


def test_the_slots_listed_here_are_all_that_are_public() -> None:
    import hostprep.slots

    listed = " ".join(text for text in ENGINE_HALF if "hostprep.slots" in text)
    assert set(hostprep.slots.__all__) <= set(re.findall(r"\w+", listed))


def _documents() -> list[Path]:
    folders = (CHECKOUT / "docs", CHECKOUT / "examples")
    found = [path for folder in folders for path in folder.rglob("*")]
    return [CHECKOUT / "README.md", *(path for path in found if path.suffix in (".md", ".yaml"))]


_NAMED = re.compile(
    r"^ *from (?P<module>hostprep[\w.]*) import (?P<names>[\w, ]+)"
    r"|^ *import (?P<plain>hostprep[\w.]*)"
    r"|-m (?P<run>hostprep[\w.]*\w)"
    r"|\"(?P<configured>hostprep\.(?:engines|boot)[\w.]*)\"",
    re.MULTILINE,
)


def test_what_the_docs_import_and_run_is_listed_here() -> None:
    """What a document names from now on is checked from now on."""
    statements = "\n".join((*ENGINE_HALF, *PLUGINS, *NODE_HALF))
    run = {words[1] for words in (*MODULES, *PROGRAM, *NODE_COMMANDS)} | {"hostprep.agent.worker"}
    unlisted = []
    for path in _documents():
        for match in _NAMED.finditer(path.read_text()):
            if match["run"]:
                known = match["run"] in run or match["run"] == "hostprep.engines"
            elif match["module"]:
                words = re.findall(r"\w+", match["names"])
                known = all(_imports(statements, match["module"], word) for word in words)
            else:
                known = f" {match['plain'] or match['configured']}" in statements
            if not known:
                unlisted.append(f"{path.relative_to(CHECKOUT)}: {match[0].strip()}")
    assert not unlisted


def _imports(statements: str, module: str, name: str) -> bool:
    pattern = rf"from {re.escape(module)} import [\w, ]*\b{name}\b"
    return re.search(pattern, statements) is not None
