"""What `--engine lmcache` asks of a pool, and how the server starts over its leases."""

from __future__ import annotations

import configparser
import subprocess
import tomllib
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from hostprep.backing import GIB, MIB
from hostprep.engines.catalogue import integration_of
from hostprep.engines.launching import EngineStart, Launch, Options, Requirements
from hostprep.engines.lmcache import launch
from hostprep.engines.lmcache.launch import SYNTAX, url_of
from hostprep.engines.lmcache.server import Server
from hostprep.errors import BadInputError, NotReadyError
from hostprep.node.apply.publish import build_zipapp
from tests.unit.engines.leases import leases_of

pytestmark = pytest.mark.unit

LMCACHE = integration_of("lmcache")
SERVER = ("lmcache", "server")
NOTHING = {"PATH": "/nowhere"}
PROJECT = Path(__file__).parents[3] / "pyproject.toml"


@pytest.fixture(autouse=True)
def found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the plugin found, as where an agent has published it."""
    monkeypatch.setattr(launch, "offers_plugin", lambda *_: True)


def _required(*options: str, told: Options | None = None) -> Requirements:
    return launch.requirements(
        EngineStart(LMCACHE, (*SERVER, *options), NOTHING, told or Options())
    )


def _completed(*options: str, sizes: Sequence[int] = (64 * MIB,)) -> Launch:
    return launch.complete(EngineStart(LMCACHE, (*SERVER, *options), NOTHING), leases_of(*sizes))


def test_the_whole_region_becomes_l1() -> None:
    assert _required() == Requirements(count=1)
    done = _completed("--eviction-policy", "ARC", "--port", "5556")
    assert done.command == (
        *SERVER, "--eviction-policy", "ARC", "--port", "5556", "--l1-size-gb", "0.0625",
        "--l1-devdax-path", "/run/hostprep/kv/mem/node0-0", "--no-l1-use-lazy", "--shm-name", "",
    )  # fmt: skip
    assert done.notes == ()
    assert done.variables["HOSTPREP_LMCACHE"] == "1"


def test_the_plugin_is_found_in_the_zipapp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    (tmp_path / "hostprep.pyz").write_bytes(build_zipapp())
    leases = leases_of(512 * GIB, root=str(tmp_path))
    start = EngineStart(LMCACHE, (*SERVER, "--eviction-policy", "LRU"), NOTHING, Options())
    done = launch.complete(start, leases)
    assert done.notes == ()
    assert done.variables == {
        "HOSTPREP_LMCACHE": "1",
        "PYTHONPATH": f"{tmp_path}/hostprep.pyz",
    }
    with zipfile.ZipFile(tmp_path / "hostprep.pyz") as archive:
        (name,) = (each for each in archive.namelist() if each.endswith("entry_points.txt"))
        published = configparser.ConfigParser()
        published.read_string(archive.read(name).decode())
    declared = tomllib.loads(PROJECT.read_text())["project"]["entry-points"]
    assert {group: dict(published[group]) for group in published.sections()} == declared


@pytest.mark.parametrize("size_bytes", [8 * GIB, 511 * GIB + 2 * MIB, 3 * 4096])
def test_the_size_survives_lmcaches_float_of_gib(size_bytes: int) -> None:
    words = _completed(sizes=(size_bytes,)).command
    assert int(float(words[words.index("--l1-size-gb") + 1]) * (1 << 30)) == size_bytes


def test_its_own_size_is_the_least_that_a_region_must_have() -> None:
    required = _required("--l1-size-gb", "0.5")
    assert (required.size_bytes, required.because) == (512 * MIB, "--l1-size-gb is 0.5")
    words = _completed("--l1-size-gb=0.5", sizes=(GIB,)).command
    assert words.count("--l1-size-gb") == 0
    assert "--l1-devdax-path" in words


def test_without_a_policy_it_gets_one_and_is_told() -> None:
    done = _completed()
    assert done.command[-2:] == ("--eviction-policy", "LRU")
    assert "LRU" in done.notes[0]


@pytest.mark.parametrize(
    "options",
    [
        ("--l1-devdax-path", "/dev/dax0.0"),
        ("--l1-dev", "/dev/dax0.0"),
        ("--l1-manager", '{"type": "DRAM"}'),
        ("--gds-l1-path=/mnt/nvme",),
        ("--l1-use-hugepages",),
        ("--l1-use-lazy",),
        ("--shm-name", "mine"),
        ("--p2p-listen-url", "tcp://0.0.0.0:9"),
    ],
)
def test_what_puts_l1_elsewhere_is_refused(options: tuple[str, ...]) -> None:
    with pytest.raises(BadInputError) as refused:
        _required(*options)
    assert "leave" in str(refused.value)


@pytest.mark.parametrize("options", [("--no-l1-use-lazy",), ("--shm-name", ""), ("--shm-name=",)])
def test_what_we_would_say_ourselves_is_fine(options: tuple[str, ...]) -> None:
    assert _required(*options) == Requirements(count=1)


@pytest.mark.parametrize("size", ["0", "-1", "nan", "inf", "much"])
def test_a_size_that_is_none_is_refused(size: str) -> None:
    with pytest.raises(BadInputError, match="no size"):
        _required("--l1-size-gb", size)


def test_without_the_plugin_lmcache_registers_by_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "offers_plugin", lambda *_: False)
    assert "by one call, without turns" in _completed("--eviction-policy", "LRU").notes[0]
    for size, sizes in ((), (512 * GIB,)), (("--l1-size-gb", "512"), (600 * GIB,)):
        with pytest.raises(BadInputError, match=r"512 GiB.*--count"):
            _completed(*size, sizes=sizes)
    assert _completed("--l1-size-gb", "500", sizes=(512 * GIB,)).command


def test_of_several_regions_the_others_are_added_beside_it() -> None:
    with pytest.raises(BadInputError, match="2 regions"):
        _required("--l1-size-gb", "8", told=Options(count=2))
    assert _required(told=Options(regions=("a", "b"))).count == 2
    done = _completed("--http-port", "9001", sizes=(64 * MIB, 32 * MIB))
    shell, dash_c, script, _, *words = done.command
    assert (shell, dash_c) == ("/bin/sh", "-c")
    adding = (
        "hostprep.engines.helper_process lmcache http://127.0.0.1:9001 /run/hostprep/kv/mem/node0-1"
    )
    assert f"{adding} {32 * MIB} & exec " in script
    assert words[:4] == [*SERVER, "--http-port", "9001"]
    assert "/run/hostprep/kv/mem/node0-0" in words


def test_an_address_at_which_nobody_could_be_told_of_the_others_is_refused_first() -> None:
    assert _required("--http-port", "x") == Requirements(count=1), "LMCache says it better"
    with pytest.raises(BadInputError, match="http://127.0.0.1:x") as refused:
        _required("--http-port", "x", told=Options(count=2))
    assert refused.value.exit_code == 2


def test_the_shell_hands_every_word_on_as_it_is() -> None:
    done = _completed("--instance-id", "a b'$x", sizes=(64 * MIB, 32 * MIB))
    shell, dash_c, script, name, *words = done.command
    _, _, becoming = script.partition(" & ")
    printed = subprocess.run(
        [shell, dash_c, becoming, name, "printf", "%s\\0", *words[2:]],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert printed.stdout.split("\0")[:-1] == words[2:]


def test_another_command_is_refused() -> None:
    for command in (("vllm", "serve", "m"), ("lmcache", "ping"), ("lmcache",)):
        with pytest.raises(BadInputError, match="lmcache server"):
            launch.requirements(EngineStart(LMCACHE, command, NOTHING))


@pytest.mark.parametrize(
    ("options", "url"),
    [
        ((), "http://127.0.0.1:8080"),
        (("--http-host", "0.0.0.0", "--http-port", "9"), "http://127.0.0.1:9"),
        (("--http-host=10.0.0.7",), "http://10.0.0.7:8080"),
        (("--http-host", "::1"), "http://[::1]:8080"),
    ],
)
def test_where_its_http_interface_will_be(options: tuple[str, ...], url: str) -> None:
    assert url_of(SYNTAX.read(("/opt/venv/bin/lmcache", "server", *options))) == url


@pytest.mark.parametrize("url", ["tcp://127.0.0.1:5555", "127.0.0.1:8080", "http://", "http://a:b"])
def test_what_is_no_url_of_it_is_refused(url: str) -> None:
    with pytest.raises(BadInputError, match="is no URL"):
        Server(url)


def test_a_server_that_is_not_there_is_not_ready() -> None:
    with pytest.raises(NotReadyError, match="no LMCache server answers"):
        Server("http://127.0.0.1:1").wait(0.0)


def test_who_has_workers_copy_is_told_what_that_costs_over_a_region() -> None:
    slow = ("--eviction-policy", "LRU", "--supported-transfer-mode")
    assert _completed(*slow, "lmcache_driven").notes == ()
    for mode in ("engine_driven", "auto"):
        (note,) = _completed(*slow, mode).notes
        assert "message queue" in note
        assert "LMCACHE_MP_TRANSFER_MODE=lmcache_driven" in note
