"""What was asked for: read, saved, read again, and what may be done with it."""

from __future__ import annotations

import contextlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hostprep.agent.desired import (
    FILE_NAME,
    DesiredState,
    Source,
    entry_key,
    instruction_of,
    prepare_folder,
    read_saved,
    save,
)
from hostprep.api.node_resource import PoolEntry
from hostprep.api.pool_spec import PoolState
from hostprep.errors import BadInputError
from tests.support.agent_values import desired_state_of, entry_of

pytestmark = pytest.mark.unit


def test_what_is_saved_is_read_again(tmp_path: Path) -> None:
    desired = desired_state_of(entry_of(), entry_of("batch", absent=True))
    save(str(tmp_path), desired)

    saved = read_saved(str(tmp_path))

    assert saved is not None
    assert saved.source is Source.SAVED
    assert saved.has_same_content_as(desired)


def test_no_file_is_no_saved_state(tmp_path: Path) -> None:
    assert read_saved(str(tmp_path)) is None


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        '{"version": 2}',
        '{"version": 1, "pools": {}}',
        '{"version": 1, "uid": "", "generation": 0, "boot_id": "", "pools": [{}]}',
        "[" * 100_000,
        '{"version": 1}',
        '{"version": 1, "uid": "u", "generation": 1, "boot_id": "b", "pools": null}',
    ],
)
def test_a_damaged_file_is_said_and_counts_for_nothing(tmp_path: Path, text: str) -> None:
    (tmp_path / FILE_NAME).write_text(text)

    with pytest.raises(BadInputError, match="cannot be used"):
        read_saved(str(tmp_path))


@given(data=st.binary(max_size=300))
def test_no_file_whatsoever_brings_it_down(data: bytes, tmp_path_factory: Any) -> None:
    folder = tmp_path_factory.mktemp("state")
    (folder / FILE_NAME).write_bytes(data)
    with contextlib.suppress(BadInputError):
        read_saved(str(folder))


def test_without_an_instruction_nothing_is_to_be_done() -> None:
    desired = desired_state_of(entry_of(), entry_of("old", absent=True), source=Source.NOTHING)
    assert instruction_of(desired).pools == ()


def test_the_file_alone_releases_nothing() -> None:
    instruction = instruction_of(
        desired_state_of(entry_of(), entry_of("old", absent=True), source=Source.SAVED)
    )

    assert [one.spec.name for one in instruction.pools] == ["kv"]
    assert instruction.withheld == {"old"}


@pytest.mark.parametrize(
    ("boot", "installs"), [("Systemd", True), ("systemd", True), ("None", False)]
)
def test_both_spellings_of_boot_install_its_unit(boot: str, installs: bool) -> None:
    entry = entry_of()
    entry = replace(entry, policy={**entry.policy, "boot": boot})
    assert instruction_of(desired_state_of(entry)).pools[0].at_boot is installs


def test_the_live_object_releases() -> None:
    instruction = instruction_of(desired_state_of(entry_of("old", absent=True)))

    assert [one.spec.state for one in instruction.pools] == [PoolState.ABSENT]


def test_a_policy_that_makes_no_sense_concerns_its_pool_alone() -> None:
    bad = PoolEntry(name="bad", policy={"size": "much"})
    instruction = instruction_of(desired_state_of(bad, entry_of()))

    assert [one.spec.name for one in instruction.pools] == ["kv"]
    assert instruction.refused["bad"].reason == "BadPolicy"
    assert "policy.size" in instruction.refused["bad"].message


def test_regions_are_left_dirty_where_claims_scrub() -> None:
    on_claim = PoolEntry(name="kv", policy={"size": "1Gi", "scrub": {"when": "OnClaim"}})

    assert instruction_of(desired_state_of(on_claim)).pools[0].leave_dirty
    assert not instruction_of(desired_state_of(entry_of())).pools[0].leave_dirty


@pytest.mark.parametrize(
    "document",
    [
        {},
        {"metadata": None},
        {"metadata": {}, "spec": {"pools": [{}]}},
        {"metadata": {}, "spec": 1},
    ],
)
def test_an_object_that_cannot_be_read_is_said(document: dict[str, Any]) -> None:
    with pytest.raises(BadInputError, match="cannot be read"):
        DesiredState.of_object(document, boot_id="b")


def test_every_wording_of_an_entry_has_a_key_of_its_own() -> None:
    keys = {
        entry_key(entry)
        for entry in (
            entry_of(),
            entry_of(generation=2),
            entry_of(absent=True),
            entry_of("batch"),
            PoolEntry(name="kv", uid="uid-of-kv", generation=1, policy={"size": "9Gi"}),
        )
    }
    assert len(keys) == 5


def test_the_file_is_for_its_owner_alone(tmp_path: Path) -> None:
    save(str(tmp_path), desired_state_of(entry_of()))

    assert (tmp_path / FILE_NAME).stat().st_mode & 0o777 == 0o600
    assert json.loads((tmp_path / FILE_NAME).read_text())["version"] == 1


def test_a_state_folder_that_cannot_be_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for folder in ("relative", str(tmp_path / "file" / "below")):
        with pytest.raises(BadInputError, match="state folder"):
            prepare_folder(folder)
