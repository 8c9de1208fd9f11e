"""The operator's queue: each key once, one worker a key, urgent first, failures later."""

from __future__ import annotations

import asyncio

import pytest

from hostprep_operator.queue import KeyedQueue, QueueClosed
from tests.unit.hostprep_operator.virtual_time import run_virtually

pytestmark = pytest.mark.unit


def _queue() -> KeyedQueue[str]:
    return KeyedQueue(jitter=lambda: 0.0)


async def _taken(queue: KeyedQueue[str], count: int) -> list[str]:
    keys = []
    for _ in range(count):
        keys.append(await queue.get())
        queue.done(keys[-1])
    return keys


def test_a_key_that_is_added_many_times_is_looked_at_once() -> None:
    async def scenario() -> None:
        queue = _queue()
        for key in ("a", "b", "a", "a"):
            queue.add(key)
        assert len(queue) == 2
        assert await _taken(queue, 2) == ["a", "b"]
        assert len(queue) == 0

    run_virtually(scenario())


def test_a_key_added_while_a_worker_has_it_comes_again_afterwards_and_not_before() -> None:
    async def scenario() -> None:
        queue = _queue()
        queue.add("a")
        assert await queue.get() == "a"
        queue.add("a")
        queue.add("a")
        queue.add("b")
        assert await queue.get() == "b", "two workers must never have the same key"
        queue.done("a")
        assert await queue.get() == "a"
        queue.done("a")
        assert len(queue) == 0

    run_virtually(scenario())


def test_urgent_keys_overtake_those_that_wait() -> None:
    async def scenario() -> None:
        queue = _queue()
        for key in ("a", "b", "c"):
            queue.add(key)
        queue.add("c", urgent=True)
        queue.add("d", urgent=True)
        assert await _taken(queue, 4) == ["c", "d", "a", "b"]
        assert len(queue) == 0

    run_virtually(scenario())


def test_a_key_made_urgent_while_a_worker_has_it_comes_first_afterwards() -> None:
    async def scenario() -> None:
        queue = _queue()
        queue.add("a")
        assert await queue.get() == "a"
        queue.add("b")
        queue.add("a", urgent=True)
        queue.done("a")
        assert await _taken(queue, 2) == ["a", "b"]

    run_virtually(scenario())


def test_a_waiting_worker_gets_a_key_at_once() -> None:
    async def scenario() -> None:
        queue = _queue()
        waiter = asyncio.create_task(queue.get())
        await asyncio.sleep(5)
        queue.add("a")
        assert await waiter == "a"
        assert asyncio.get_running_loop().time() == 5

    run_virtually(scenario())


def test_several_waiting_workers_each_get_one_key() -> None:
    async def scenario() -> None:
        queue = _queue()
        waiters = [asyncio.create_task(queue.get()) for _ in range(3)]
        await asyncio.sleep(0)
        for key in ("a", "b", "c"):
            queue.add(key)
        assert sorted(await asyncio.gather(*waiters)) == ["a", "b", "c"]

    run_virtually(scenario())


def test_a_worker_cancelled_in_the_moment_it_is_woken_leaves_the_key_to_another() -> None:
    async def scenario() -> None:
        queue = _queue()
        first = asyncio.create_task(queue.get())
        second = asyncio.create_task(queue.get())
        await asyncio.sleep(0)
        queue.add("a")
        first.cancel()
        assert await second == "a"

    run_virtually(scenario())


def test_a_delayed_key_comes_when_its_time_has_come() -> None:
    async def scenario() -> None:
        queue = _queue()
        queue.add_after("a", 30)
        assert await queue.get() == "a"
        assert asyncio.get_running_loop().time() == 30

    run_virtually(scenario())


def test_of_two_wishes_for_later_the_earlier_counts() -> None:
    async def scenario() -> None:
        queue = _queue()
        queue.add_after("a", 30)
        queue.add_after("a", 10)
        queue.add_after("a", 20)
        await _taken(queue, 1)
        assert asyncio.get_running_loop().time() == 10
        await asyncio.sleep(60)
        assert len(queue) == 0

    run_virtually(scenario())


def test_a_look_that_comes_earlier_replaces_the_one_wished_for_later() -> None:
    async def scenario() -> None:
        queue = _queue()
        queue.add_after("a", 10)
        queue.add("a")
        await _taken(queue, 1)
        await asyncio.sleep(60)
        assert len(queue) == 0

    run_virtually(scenario())


def test_failures_come_later_each_time_up_to_a_minute_and_a_success_starts_over() -> None:
    async def scenario() -> None:
        queue = _queue()
        delays = []
        for _ in range(12):
            delays.append(queue.retry("a"))
            await _taken(queue, 1)
        assert delays[:4] == pytest.approx([0.1, 0.2, 0.4, 0.8])
        assert delays == sorted(delays)
        assert delays[-1] == 60
        queue.forget_failures("a")
        assert queue.retry("a") == pytest.approx(0.1)

    run_virtually(scenario())


def test_a_server_that_asks_for_patience_gets_it() -> None:
    async def scenario() -> None:
        queue = _queue()
        assert queue.retry("a", at_least_s=7) == 7
        await queue.get()
        assert asyncio.get_running_loop().time() == 7

    run_virtually(scenario())


def test_backoffs_are_spread_so_that_failures_do_not_come_back_together() -> None:
    async def scenario() -> None:
        stretched = KeyedQueue[str](jitter=lambda: 1.0)
        assert stretched.retry("a") == pytest.approx(0.2)

    run_virtually(scenario())


def test_the_oldest_waiting_key_is_known() -> None:
    async def scenario() -> None:
        queue = _queue()
        assert queue.oldest_s() == 0
        queue.add("a")
        await asyncio.sleep(3)
        queue.add("b")
        assert queue.oldest_s() == 3
        await _taken(queue, 1)
        assert queue.oldest_s() == 0

    run_virtually(scenario())


def test_a_closed_queue_sends_its_workers_home() -> None:
    async def scenario() -> None:
        queue = _queue()
        waiters = [asyncio.create_task(queue.get()) for _ in range(2)]
        queue.add_after("a", 1)
        await asyncio.sleep(0)
        queue.close()
        for waiter in waiters:
            with pytest.raises(QueueClosed):
                await waiter
        queue.add("b")
        with pytest.raises(QueueClosed):
            await queue.get()

    run_virtually(scenario())


def test_whether_urgent_keys_wait_is_known() -> None:
    async def scenario() -> None:
        queue = _queue()
        queue.add("a")
        assert not queue.has_urgent()
        queue.add("b", urgent=True)
        assert queue.has_urgent()
        await _taken(queue, 1)
        assert not queue.has_urgent()

    run_virtually(scenario())
