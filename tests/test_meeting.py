"""Ranks meet afresh at each start of a job, in a store that remembers the ones before; who is absent is named."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from minigpt_dist.launch.meeting import NotMet, TCPStore, absent, meet


@pytest.fixture
def store() -> TCPStore:
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def each(store: TCPStore, ranks: list[int], body: Callable[[TCPStore, int], object]) -> None:
    """`body` on a thread a rank, each with a connection of its own."""
    clients = {rank: TCPStore("127.0.0.1", store.port, is_master=False, wait_for_workers=False) for rank in ranks}
    threads = [threading.Thread(target=body, args=(clients[rank], rank)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_each_start_meets_afresh_in_a_store_that_remembers_the_one_before(store: TCPStore) -> None:
    places: list[dict[int, str]] = [{}, {}]
    for start in range(2):  # of the first one, rank 1's name and all answers stay in the store

        def body(client: TCPStore, rank: int, start: int = start) -> None:
            mine = meet(client, rank, 3, timeout_s=30)
            mine.set(f"seen-{rank}", str(start))
            places[start][rank] = ",".join(mine.get(f"seen-{other}").decode() for other in range(3))

        each(store, [0, 1, 2], body)
    assert places == [dict.fromkeys(range(3), "0,0,0"), dict.fromkeys(range(3), "1,1,1")]


def test_an_answer_that_the_start_before_has_left_is_not_taken(store: TCPStore) -> None:
    each(store, [0, 1], lambda client, rank: meet(client, rank, 2, timeout_s=30))
    with pytest.raises(NotMet) as caught:
        meet(store, 1, 2, timeout_s=0.2)  # no rank 0 is there now
    assert caught.value.lost == [0]


def test_who_does_not_come_is_named(store: TCPStore) -> None:
    with pytest.raises(NotMet) as caught:
        meet(store, 0, 3, timeout_s=0.05)
    assert caught.value.lost == [1, 2]


def test_who_does_not_answer_after_a_loss_is_named(store: TCPStore) -> None:
    found: dict[int, list[int]] = {}
    each(store, [0, 2, 3], lambda client, rank: found.update({rank: absent(client, rank, 5, grace_s=0.5)}))
    assert found == {0: [1, 4], 2: [1, 4], 3: [1, 4]}
