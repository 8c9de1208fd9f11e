"""The label with which containers may use a file, from the one that it has."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hostprep.linux.selinux import shared_label

pytestmark = pytest.mark.unit

_WORD = st.text("abcdefghijklmnopqrstuvwxyz_", min_size=1)
_CATEGORIES = st.sampled_from(["", ":c1", ":c1,c2", ":c0.c1023"])


@pytest.mark.parametrize(
    ("label", "shared"),
    [
        (
            "system_u:object_r:container_var_run_t:s0",
            "system_u:object_r:container_file_t:s0",
        ),
        (
            "system_u:object_r:container_file_t:s0:c5,c730",
            "system_u:object_r:container_file_t:s0",
        ),
        ("unconfined_u:object_r:tmpfs_t:s0", "unconfined_u:object_r:container_file_t:s0"),
        ("system_u:object_r:tmpfs_t", "system_u:object_r:container_file_t"),  # a policy of types
        ("system_u:object_r:hugetlbfs_t:s0", "system_u:object_r:hugetlbfs_t:s0"),
        ("unlabeled", ""),  # no policy is loaded
        ("", ""),
    ],
)
def test_type_and_level_change_and_nothing_else(label: str, shared: str) -> None:
    assert shared_label(label) == shared


@given(_WORD, _WORD, _CATEGORIES)
def test_what_is_shared_stays_as_it_is(user: str, kind: str, categories: str) -> None:
    label = shared_label(f"{user}:object_r:{kind}:s0{categories}")
    assert shared_label(label) == label
    assert label.startswith(f"{user}:object_r:")


@given(st.text())
def test_any_text_is_a_label_or_none(text: str) -> None:
    shared = shared_label(text)
    assert shared == "" or shared.split(":", 1)[0] == text.split(":", 1)[0]
