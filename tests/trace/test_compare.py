"""Two traces side by side: where they part is known by construction."""

import numpy as np

from dlm.trace import diff, from_states


def made(states, **facts):
    return from_states("x", states, 0, **facts)


def test_where_two_traces_part():
    a = made([[1, 0, 0], [1, 5, 0], [1, 5, 6]], own={"seed": 1}, context={"sampler": {"temperature": 0.0}})
    b = made([[1, 0, 0], [1, 5, 0], [1, 5, 7], [1, 8, 7]], own={"seed": 2}, context={"sampler": {"temperature": 0.0}})
    found = diff(a, b)
    assert not found.identical
    assert (found.first.step, found.first.position, found.first.a, found.first.b) == (1, 2, 6, 7)
    assert found.counts == (0, 0, 1, 2)
    assert found.shared_states == 2
    assert found.facts == {"seed": (1, 2)}
    assert "they part at step 1, position 2: 6 / 7" in str(found)


def test_the_same_trace_is_identical():
    a = made([[1, 0, 0], [1, 5, 0], [1, 5, 6]])
    assert diff(a, a).identical and str(diff(a, a)) == "identical at 2 of 2 steps"


def test_lengths_and_steps_count_too():
    short, long = made([[1, 0], [1, 2]]), made([[1, 0], [1, 2], [1, 2, 3]])
    assert diff(short, long).first == type(diff(short, long).first)(step=1, position=2, a=None, b=3)
    waits = made([[1, 0], [1, 2], [1, 2]])
    assert diff(short, waits).first is None and not diff(short, waits).identical
    other = made([[4, 0], [4, 2]])
    assert diff(short, other).first.step == -1
    assert "at the start" in str(diff(short, other))


def test_every_single_change_is_found():
    rng = np.random.default_rng(0)
    states = [np.zeros(9, np.int32)]
    for position in rng.permutation(9):
        states.append(states[-1].copy())
        states[-1][position] = 5
    a = made(states)
    for step in range(1, 10):
        for position in np.flatnonzero(states[step] != states[step - 1]):
            changed = [state.copy() for state in states]
            for later in changed[step:]:
                later[position] = 6
            first = diff(a, made(changed)).first
            assert (first.step, first.position) == (step - 1, position)
