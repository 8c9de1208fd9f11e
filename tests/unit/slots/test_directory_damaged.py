"""Bytes of any kind where a directory is expected: never an exception, and never a wrong hit.

`LONG=1` plays some minutes. A failure names its seed.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Sequence
from struct import Struct
from zlib import crc32

import pytest

from hostprep.slots import Directory, Group, Layout, Request, ShortageError, SlotPool

pytestmark = pytest.mark.unit

_ROUNDS = 100_000 if os.environ.get("LONG", "") not in {"", "0"} else 400
_SLOTS = 12
_LAYOUT = Layout(1, (Group("kv", _SLOTS, 1),))
_KEY_BYTES = 8
_SIZE_BYTES = Directory.size_bytes_for(_SLOTS, _KEY_BYTES)
_RECORD_BYTES = 64
_RECORDS_BYTES = _SLOTS * _RECORD_BYTES
_HEADER_BYTES = 65_536
_IDENTITY_AT = 4096
_IDENTITY = {"model": "m", "weights": "w"}
_HEADER = Struct("<8sIIIIQIII32s")
"""As docs/directory.md has it: magic, version, bytes of header, record and key, N, epoch, bytes and
check of the identity, the layout. Its own check follows."""
_FORGED: dict[str, tuple[int, Sequence[object]]] = {
    "version": (1, [0, 2, 3, 1 << 31]),
    "header": (2, [0, 1, 4096, 1 << 20, (1 << 32) - 1]),
    "record": (3, [0, 1, 63, 72, (1 << 32) - 1]),
    "key": (4, [0, 1, 32, 255, (1 << 32) - 1]),
    "slots": (5, [0, 1, _SLOTS - 1, _SLOTS + 1, 1 << 31, (1 << 64) - 1]),
    "identity": (7, [0, 1, 61_440, 61_441, (1 << 32) - 1]),
    "layout": (9, [bytes(32), b"\xff" * 32]),
}
_NO_IDENTITIES = (
    b"", b"{", b"[]", b"1" * 60_000, b"[" * 60_000, b'{"a":' * 10_000, b'{"a":1}', b'{"a":{}}',
    b"\xff\xfe", b"null", b"NaN", b'{"a":NaN}', b'{"weights":"w"',
)  # fmt: skip


def _written(seed: int) -> tuple[bytearray, dict[int, int]]:
    """Return a directory of that engine's blocks, and which slot has which of them."""
    memory = bytearray(_SIZE_BYTES)
    found = _open(memory)
    found.reset(_IDENTITY)
    pool = _pool(found)
    pool.recover()
    return memory, _store(pool, random.Random(seed).sample(range(100), 11))


def _open(memory: bytearray) -> Directory:
    return Directory(memoryview(memory), _LAYOUT, key_bytes=_KEY_BYTES)


def _pool(found: Directory) -> SlotPool:
    return SlotPool(_LAYOUT, hash_bytes=_KEY_BYTES, spare=0, directory=found)


def _store(pool: SlotPool, numbers: list[int]) -> dict[int, int]:
    hashes = [number.to_bytes(_KEY_BYTES, "big") for number in numbers]
    request = Request(
        "r", 1 + len(hashes), hashes, computed_tokens=1, first_block=1, reuse_limit_tokens=0
    )
    (claim,) = pool.claim_batch([request]).claims
    slots = dict(zip(numbers, claim.uses[0].slots, strict=True))
    claim.commit()
    claim.release()
    return slots


def _believed(memory: bytearray) -> dict[int, int]:
    (kept,) = _open(memory).read()
    assert sorted(kept.order) == sorted(set(kept.slots.values()))
    assert not set(kept.slots.values()) & set(kept.writing)
    return {int.from_bytes(key, "big"): slot for key, slot in kept.slots.items()}


_OTHERS, _ = _written(2)
_OWN, _HELD = _written(1)


def _anywhere(choose: random.Random) -> int:
    """Return an offset: in a record, in the header, in the identity, or between."""
    header = _SIZE_BYTES - _HEADER_BYTES
    parts = ((0, _RECORDS_BYTES), (0, header), (header, header + 96), (header, _SIZE_BYTES))
    return choose.randrange(*choose.choice(parts))


def random_bytes(choose: random.Random, memory: bytearray) -> None:
    at = _anywhere(choose)
    length = min(choose.choice((1, 4, 64, 600, _SIZE_BYTES)), _SIZE_BYTES - at)
    memory[at : at + length] = choose.randbytes(length)


def flipped_bits(choose: random.Random, memory: bytearray) -> None:
    for _ in range(choose.choice((1, 2, 3, 100))):
        memory[_anywhere(choose)] ^= 1 << choose.randrange(8)


def cut_off(choose: random.Random, memory: bytearray) -> None:
    """Zeros from any byte on, or up to it: a file that was cut short and is made longer again."""
    at = _anywhere(choose)
    part = slice(at, None) if choose.random() < 0.5 else slice(0, at)
    memory[part] = bytes(len(memory[part]))


def moved(choose: random.Random, memory: bytearray) -> None:
    """Records, whole or in part, where others belong."""
    length = choose.choice((8, 24, 32, _RECORD_BYTES, 3 * _RECORD_BYTES))
    words = (_RECORDS_BYTES - length) // 8
    here, there = 8 * choose.randrange(words), 8 * choose.randrange(words)
    memory[there : there + length] = memory[here : here + length]


def of_others(choose: random.Random, memory: bytearray) -> None:
    """Another engine's records, of the same layout and identity, and of another time."""
    begin, end = sorted(choose.randrange(0, _RECORDS_BYTES + 1, 8) for _ in range(2))
    memory[begin:end] = _OTHERS[begin:end]


def all_in_one_state(choose: random.Random, memory: bytearray) -> None:
    state = choose.choice((0, 1, 2, 3, 255))
    for number in range(_SLOTS):
        memory[number * _RECORD_BYTES + 4] = state


def forged_header(choose: random.Random, memory: bytearray) -> None:
    """A header that is right but for one field: a later version, too many slots."""
    fields = list(_HEADER.unpack_from(memory, _SIZE_BYTES - _HEADER_BYTES))
    number, values = _FORGED[choose.choice(list(_FORGED))]
    fields[number] = choose.choice(values)
    _seal(memory, fields)


def forged_identity(choose: random.Random, memory: bytearray) -> None:
    """An identity that is none, in a header that is right."""
    _forge_identity(memory, choose.choice(_NO_IDENTITIES))


def _forge_identity(memory: bytearray, text: bytes) -> None:
    at = _SIZE_BYTES - _HEADER_BYTES
    memory[at + _IDENTITY_AT : at + _IDENTITY_AT + len(text)] = text
    fields = list(_HEADER.unpack_from(memory, at))
    fields[7:9] = len(text), crc32(text)
    _seal(memory, fields)


def _seal(memory: bytearray, fields: list[object]) -> None:
    header = _HEADER.pack(*fields)
    header += crc32(header).to_bytes(4, "little")
    at = _SIZE_BYTES - _HEADER_BYTES
    memory[at : at + len(header)] = header


_DAMAGES = (
    random_bytes, flipped_bits, cut_off, moved, of_others, all_in_one_state, forged_header,
    forged_identity,
)  # fmt: skip


def _play(seed: int) -> int:
    """Damage a directory and go on with it. Returns how many of its records are believed."""
    choose = random.Random(seed)
    memory = bytearray(_OWN)
    for _ in range(choose.choice((1, 1, 1, 2, 5))):
        choose.choice(_DAMAGES)(choose, memory)
    found = _open(memory)
    assert (found.identity is None) or found.identity == _IDENTITY
    assert found.identity is None or found.problem is None
    believed = _believed(memory)
    assert believed.items() <= _HELD.items()
    assert not believed or found.identity == _IDENTITY
    pool = _pool(found)
    if found.identity is None:
        found.reset(_IDENTITY)
    assert pool.recover() == len(believed)
    held = dict(believed)
    for _ in range(2):
        try:
            new = _store(pool, choose.sample(range(200, 300), 3))
        except ShortageError:  # what looks as if it were being written is not handed out
            assert len(found.read()[0].writing) > _SLOTS - 3
            break
        held = {number: slot for number, slot in held.items() if slot not in new.values()} | new
        assert set(_believed(memory).items()) <= set(held.items())
        assert new.items() <= _believed(memory).items()
    return len(believed)


@pytest.mark.timeout(1800)  # in its long form
def test_damage_never_raises_and_never_hits_wrongly() -> None:
    base = random.randrange(1 << 48)
    believed = 0
    for seed in range(base, base + _ROUNDS):
        try:
            believed += _play(seed)
        except Exception as error:
            raise AssertionError(f"seed {seed}") from error
    assert _ROUNDS < believed < _SLOTS * _ROUNDS, "some is left of most of them"


@pytest.mark.parametrize("text", _NO_IDENTITIES)
def test_what_is_no_identity_is_none(text: bytes) -> None:
    memory = bytearray(_OWN)
    _forge_identity(memory, text)
    assert (_open(memory).identity, _open(memory).problem) == (None, "its identity is damaged")


def test_an_identity_of_any_text_is_given_as_it_is() -> None:
    text = {"\ud800": "a\nb\x1b[2J", "": "\0"}
    memory = bytearray(_SIZE_BYTES)
    _open(memory).reset(text)
    assert _open(memory).identity == json.loads(json.dumps(text))


def test_the_damage_is_noticed_if_nothing_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plays can fail: with a check that says nothing."""
    monkeypatch.setattr("hostprep.slots.directory.crc32", lambda *_: 0)
    monkeypatch.setattr(f"{__name__}._OWN", _written(1)[0])
    failed = 0
    for seed in range(200):
        try:
            _play(seed)
        except AssertionError:
            failed += 1
    assert failed
