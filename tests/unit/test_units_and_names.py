"""Quantities, names, and how an owner is recognised."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hostprep.api.pool_spec import INTERLEAVE, Placement
from hostprep.client.owner import Owner, OwnerRecord
from hostprep.errors import BadInputError
from hostprep.paths import check_pool_name
from hostprep.units import format_bytes, format_seconds, parse_quantity

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("1", 1),
        ("8Gi", 8 << 30),
        ("1.5Ki", 1536),
        ("512M", 512_000_000),
        ("1e3", 1000),
        ("2E3", 2000),
        ("1E", 10**18),
        (".5Ki", 512),
        (" 4Ti ", 4 << 40),
    ],
)
def test_quantities_are_those_of_kubernetes(text: str, size_bytes: int) -> None:
    assert parse_quantity(text) == size_bytes


@pytest.mark.parametrize(
    "text", ["", "0", "-1", "1m", "Gi", "1 Gi", "1gi", "0x10", "1e99", "9Ei", "1.0001", "٣", "inf"]
)
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(BadInputError):
        parse_quantity(text)


@given(st.text(max_size=40))
def test_any_text_is_a_size_or_refused(text: str) -> None:
    with contextlib.suppress(BadInputError):
        assert 0 < parse_quantity(text) < 1 << 63


@given(st.integers(1, 1 << 60))
def test_bytes_written_plainly_read_back(size_bytes: int) -> None:
    assert parse_quantity(str(size_bytes)) == size_bytes
    assert format_bytes(size_bytes)


def test_durations_have_a_unit_that_fits() -> None:
    assert [format_seconds(s) for s in (0.0012, 3.25, 600)] == ["1.2 ms", "3.2 s", "10 min"]


@given(st.from_regex(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", fullmatch=True))
def test_dns_labels_are_pool_names(name: str) -> None:
    assert check_pool_name(name) == name


@given(st.text(alphabet="aZ09-./_\n\0 ", max_size=70))
def test_pool_names_cannot_leave_their_folder(name: str) -> None:
    try:
        check_pool_name(name)
    except BadInputError:
        return
    assert not set(name) & set("./\0\n ")
    assert 1 <= len(name) <= 63


@given(st.integers(0, 99_999), st.integers(0, 99_999))
def test_region_names_tell_their_placement(node: int, index: int) -> None:
    for placement in (Placement(node), INTERLEAVE):
        assert Placement.of_region(placement.region_name(index)) == (placement, index)


def test_an_owner_is_recognised_by_token_and_content() -> None:
    owner = Owner("0123456789abcdef", {"model": "m", "tp": "0/2"})
    kept = OwnerRecord.from_json(owner.record().to_json())
    assert kept == owner.record()
    assert kept is not None
    assert "0123456789abcdef" not in str(kept)
    assert owner.is_same_as(kept)
    assert owner.difference(kept) is None
    assert not Owner("fedcba9876543210").is_same_as(kept)
    other = Owner("0123456789abcdef", {"model": "m", "tp": "1/2"})
    assert other.difference(kept) == "tp is '1/2', the region's is '0/2'"
