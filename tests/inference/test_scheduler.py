"""Who takes part in a forward, and whose pages go: the scheduler alone, without a network's answers."""

import dlm
from dlm.inference.parking import park

from .requests import FAMILIES, ids
from .tiny import tiny_lm


def batch_of(lengths, gen_length=8, family="sdar", **engine):
    """Requests of these prompt lengths in an engine that has not stepped yet."""
    made = dlm.Engine(tiny_lm(**FAMILIES[family]), page_size=4, **engine)
    for number, length in enumerate(lengths):
        made.add_request(ids(number, length), gen_length=gen_length, block_length=4)
    return made.batch, list(made.batch.sequences.values())


def numbers(scheduled):
    return [item.sequence.number for item in scheduled]


def test_a_forward_has_no_more_positions_than_it_may():
    batch, _ = batch_of([8, 8, 8], family="llada", max_num_tokens=40)
    assert numbers(batch.scheduler.schedule()) == [0, 1]  # 16 positions each


def test_those_that_waited_longest_go_first():
    batch, _ = batch_of([8, 8, 8], family="llada", max_num_tokens=48)
    assert numbers(batch.scheduler.schedule()) == [0, 1, 2]
    batch.scheduler.config = batch.scheduler.config.model_copy(update={"max_num_tokens": 16})
    turns = [numbers(batch.scheduler.schedule())[0] for _ in range(6)]
    assert turns == [0, 1, 2, 0, 1, 2]


def test_a_long_prompt_is_cut_between_blocks_of_attention():
    batch, _ = batch_of([33], max_num_tokens=18)
    ((item),) = batch.scheduler.schedule()
    assert not item.span.decides and list(item.span.positions) == list(range(16)) and item.span.visible == 16
    batch.scheduler.ran(item)
    ((item),) = batch.scheduler.schedule()
    assert list(item.span.positions) == list(range(16, 32))


def test_the_latest_arrival_is_parked_and_never_one_of_this_forward():
    batch, (first, second, third) = batch_of([8, 8, 8], num_pages=12)
    scheduled = batch.scheduler.schedule()
    assert numbers(scheduled) == [0, 1, 2]
    taken = batch.pool.allocate(batch.pool.free)
    assert batch.scheduler._provide(first, 16, scheduled=[]) and third.parked is not None
    assert batch.scheduler.running == [first, second]
    batch.pool.allocate(batch.pool.free)
    assert not batch.scheduler._provide(first, 20, scheduled=scheduled[1:2])
    assert first.parked is not None and second.parked is None
    batch.pool.release(taken)


def test_an_earlier_arrival_is_not_parked_for_a_later_one():
    batch, (first, second) = batch_of([8, 8], num_pages=8)
    batch.scheduler.schedule()
    batch.pool.allocate(batch.pool.free)
    assert not batch.scheduler._provide(second, 16, scheduled=[])
    assert second.parked is not None and first.parked is None


def test_parked_requests_come_back_before_new_ones():
    batch, (first, second, third) = batch_of([8, 8, 8], max_num_requests=2)
    assert numbers(batch.scheduler.schedule()) == [0, 1]
    batch.scheduler._park(second)
    assert list(batch.scheduler.waiting) == [second, third]
    assert numbers(batch.scheduler.schedule()) == [0, 1] and second.parked is None


def test_parked_pages_hold_what_they_held():
    batch, (first, _) = batch_of([8, 8])
    batch.scheduler.schedule()
    batch.pool.k.normal_()
    before = batch.pool.read(first.pages.tables[0])
    park(first, batch.pool)
    batch.pool.k.zero_()
    batch.pool.allocate(1)  # so that it comes back to other pages
    batch.scheduler.running.remove(first)
    batch.scheduler.waiting.appendleft(first)
    batch.scheduler.schedule()
    assert batch.pool.read(first.pages.tables[0])[:, :, : before.shape[2]].equal(before)


def test_a_cleared_pool_gets_no_page_back():
    batch, (first,) = batch_of([8])
    batch.scheduler.schedule()
    batch.pool.clear()
    taken = batch.pool.allocate(batch.pool.num_pages)
    first.pages.release(batch.pool)
    assert batch.pool.users[taken].all() and not first.pages.tables
