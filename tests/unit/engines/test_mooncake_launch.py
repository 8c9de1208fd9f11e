"""What `--engine mooncake` asks of a pool, and how the store service starts; segments in Python."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hostprep.backing import MIB
from hostprep.engines.catalogue import integration_of
from hostprep.engines.launching import EngineStart, Options, Requirements
from hostprep.engines.mooncake import launch
from hostprep.engines.mooncake.segments import Service, mount
from hostprep.errors import BadInputError, FailedError, NotReadyError
from tests.unit.engines.leases import leases_of

pytestmark = pytest.mark.unit

MOONCAKE = integration_of("mooncake")
NOTHING = {"PATH": "/nowhere"}
SERVICE = ("mc_store_rest_server", "--port", "50073")


def test_its_regions_are_mounted_beside_it() -> None:
    assert launch.requirements(
        EngineStart(MOONCAKE, SERVICE, NOTHING, Options(count=2))
    ) == Requirements(count=2)
    done = launch.complete(EngineStart(MOONCAKE, SERVICE, NOTHING), leases_of(64 * MIB, 32 * MIB))
    names = [f"hostprep-1ea5e-{index}" for index in (0, 1)]
    assert done.links == tuple((f"/dev/shm/{name}", i) for i, name in enumerate(names))
    words = f"helper_process mooncake 50073 {names[0]} {64 * MIB} {names[1]} {32 * MIB} & exec "
    assert words in done.command[2]
    assert done.command[4:] == SERVICE
    assert done.variables == {"MOONCAKE_GLOBAL_SEGMENT_SIZE": "0"}


def test_memory_of_its_own_besides_is_refused(tmp_path: Path) -> None:
    config = tmp_path / "mc.json"
    told = (*SERVICE, f"--config={config}")
    for text, said in (('{"global_segment_size": 1024}', "1024"), ("{}", "its default")):
        config.write_text(text)
        with pytest.raises(BadInputError, match=said):
            launch.requirements(EngineStart(MOONCAKE, told, NOTHING))
    config.write_text('{"global_segment_size": 0}')
    assert launch.requirements(EngineStart(MOONCAKE, told, NOTHING)) == Requirements(count=1)
    assert launch.complete(EngineStart(MOONCAKE, told, NOTHING), leases_of(MIB)).variables == {}
    with pytest.raises(BadInputError, match="4gb"):
        launch.requirements(
            EngineStart(MOONCAKE, SERVICE, {"MOONCAKE_GLOBAL_SEGMENT_SIZE": "4gb"}, Options())
        )


def test_another_command_and_port_are_refused() -> None:
    with pytest.raises(BadInputError, match="mc_store_rest_server"):
        launch.requirements(EngineStart(MOONCAKE, ("mooncake_master",), NOTHING))
    with pytest.raises(BadInputError, match="no port"):
        launch.requirements(
            EngineStart(MOONCAKE, ("mc_store_rest_server", "--port=x"), NOTHING, Options())
        )


def test_a_service_that_is_not_there_is_not_ready() -> None:
    with pytest.raises(NotReadyError, match="port 1"):
        Service("1").check()


class _Store:
    """Answers as a store does, or refuses."""

    def __init__(self, code: int = 0) -> None:
        self.code = code
        self.asked: list[tuple[Any, ...]] = []

    def mount_segment(self, *asked: Any) -> dict[str, Any]:
        self.asked.append(asked)
        return {"ret": self.code, "segment_ids": ["one"]}

    def unmount_segment(self, segment_ids: list[str]) -> int:
        self.asked.append(("unmount", *segment_ids))
        return self.code


class _Attachment:
    """As much of an attachment as mounting looks at."""

    path = "/run/hostprep/kv/mem/node1-0"
    size_bytes = 64 * MIB
    numa_node = 1
    region = leases_of(64 * MIB)[0].region
    closed = False

    def close(self) -> None:
        self.closed = True


def test_a_segment_is_the_region_and_ends_before_the_lease() -> None:
    store, memory = _Store(), _Attachment()
    with mount(store, memory) as segment:  # type: ignore[arg-type]
        assert segment.segment_ids == ["one"]
        assert store.asked == [(memory.path, 64 * MIB, 0, "tcp", "cpu:1")]
        assert not memory.closed
    assert store.asked[-1] == ("unmount", "one")
    assert memory.closed


def test_a_segment_that_the_store_keeps_keeps_its_lease() -> None:
    store, memory = _Store(), _Attachment()
    segment = mount(store, memory)  # type: ignore[arg-type]
    store.code = -1
    with pytest.raises(FailedError, match="did not unmount"):
        segment.unmount()
    assert not memory.closed
    store.code = 0
    segment.unmount()
    assert memory.closed


def test_what_does_not_fit_or_is_refused_says_so() -> None:
    with pytest.raises(BadInputError, match=f"{65 * MIB} bytes"):
        mount(_Store(), _Attachment(), size_bytes=65 * MIB)  # type: ignore[arg-type]
    with pytest.raises(FailedError, match="code -5"):
        mount(_Store(-5), _Attachment())  # type: ignore[arg-type]
