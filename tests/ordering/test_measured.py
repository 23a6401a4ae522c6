"""The measured policy: decisions that depend on time, and runs that repeat them."""

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import ordering
from ordering import echo
from ordering.echo import adaptive, stream
from syncopate.unstable import multihost_utils
from tests import reference
from tests.commands import start_two
from tests.echo_source import Source, Uses, assert_same
from tests.waiting import wait_for


class Scripted(Source):
    """A loader whose `ready` returns a given answer for each step."""

    def __init__(self, answers, first=0):
        super().__init__(10**6, first)
        self.answers, self.step, self.asked_in = answers, 0, []

    def ready(self):
        self.asked_in.append(self.step)
        return self.answers[self.step]

    def run(self, policy, first_step=0):
        """The uses of all steps."""
        self.step = first_step
        steps, uses = Uses(self, policy, first_step=first_step), []
        for use in steps:
            uses.append(use)
            self.step = use.step + 1
        return uses


@given(st.data())
def test_measured_decides_like_the_reference(data):
    total_steps, max_factor = data.draw(st.integers(1, 30)), data.draw(st.integers(1, 5))
    answers = data.draw(st.lists(st.booleans(), min_size=total_steps, max_size=total_steps))
    fresh, asked = reference.load_if_ready(answers, max_factor)
    loader = Scripted(answers)
    uses = loader.run(adaptive(total_steps=total_steps, max_factor=max_factor))
    assert [use.fresh for use in uses] == fresh
    assert loader.asked_in == asked  # only if the decision depends on it
    plan = echo.EchoPlan(fresh)
    assert plan.uses.max() <= max_factor and loader.asked == plan.loads
    assert_same(Uses(Source(99), plan), uses)  # replayed


class Timed(Scripted):
    """A loader whose batches are ready at given times; a step takes 1."""

    def __init__(self, arrivals):
        super().__init__(())
        self.arrivals = arrivals - arrivals[0]  # the first step waits

    def ready(self):
        return self.arrivals[self.asked] <= self.step


@pytest.mark.parametrize("burst", [1, 2, 4, 16])
def test_measured_echoes_only_while_no_batch_is_ready_also_of_threads_that_end_together(burst):
    for times in ([0.5], [1.9], [4.0], [30.0] + [2.0] * 59, [4.0, 1.5], [1.5, 4.0]):
        alone = np.cumsum(np.repeat(times, 480 // len(times)))
        loader = Timed(alone[burst - 1 :: burst].repeat(burst))
        uses = loader.run(adaptive(total_steps=200, max_factor=200))
        for step, load, fresh, _ in uses[1:]:
            asked_for = load if fresh else load + 1
            assert fresh == (loader.arrivals[asked_for] <= step)
        came = min(200, np.sum(loader.arrivals < 200))
        assert max(times) < 1 or came - burst <= loader.asked <= came


ANSWERS = [t % 5 in (1, 2) or t % 7 == 3 for t in range(24)]


def policy(max_factor=4, **options):
    return adaptive(total_steps=24, max_factor=max_factor, **options)


def test_measured_resumes_at_any_step():
    expected = Scripted(ANSWERS).run(policy())
    record = [use.fresh for use in expected]
    assert 1 < sum(record) < 24
    for step in range(25):
        first = echo.EchoPlan(record[:step]).first_load(step) if step else 0
        loader = Scripted(ANSWERS, first)
        actual = loader.run(policy(decided=record[:step]), first_step=step)
        assert_same(actual, expected[step:])
    again = Scripted([True] * 24)  # other answers, but recorded decisions
    assert_same(again.run(policy(decided=record)), expected)
    assert again.asked_in == []


def test_a_step_loads_only_if_all_processes_are_ready(monkeypatch):
    other = [t % 3 != 0 for t in range(24)]
    both = [a and b for a, b in zip(ANSWERS, other, strict=True)]
    fresh, asked = reference.load_if_ready(both, 4)
    assert fresh != reference.load_if_ready(ANSWERS, 4)[0]
    loader, heard = Scripted(ANSWERS), []

    def ready_on_all(ready):
        heard.append((loader.step, ready))
        return ready and other[loader.step]

    with monkeypatch.context() as patch:
        patch.setattr(stream, "ready_everywhere", ready_on_all)
        assert [use.fresh for use in loader.run(policy())] == fresh
    assert heard == [(t, ANSWERS[t]) for t in asked]
    monkeypatch.setattr(jax, "process_count", lambda: 3)
    for others in ([1, 1], [1, 0], [0, 0]):
        gather = lambda here, others=others: np.array([here, *others])  # noqa: E731
        monkeypatch.setattr(multihost_utils, "process_allgather", gather)
        assert stream.ready_everywhere(True) is (others == [1, 1])
        assert stream.ready_everywhere(False) is False


def test_measured_echoes_while_a_real_loader_waits():
    source = Source(99, wait_at=1)
    with ordering.data.prefetch_to_device(source, depth=3) as loader:
        steps = Uses(loader, adaptive(total_steps=8, max_factor=3))
        assert [next(steps)[:3] for _ in range(3)] == [(0, 0, True), (1, 0, False), (2, 0, False)]
        source.go_on.set()
        assert next(steps)[:3] == (3, 1, True)  # max_factor is reached, so it waits for the batch
        wait_for(loader.ready)
        assert next(steps)[:3] == (4, 2, True)


PROCESS = """
import sys, time, jax
given = dict(argument.removeprefix("--").split("=") for argument in sys.argv[1:])
rank, count = int(given["process_id"]), int(given["num_processes"])
jax.distributed.initialize(given["coordinator_address"], num_processes=count, process_id=rank)
import numpy as np
import local_opt, ordering

def slow():
    while True:
        time.sleep(0.03 * rank)  # the input of process 0 is always ready
        yield np.ones(2)

policy = ordering.echo.adaptive(total_steps=60, max_factor=50)
fresh = []
with ordering.data.prefetch_to_device(slow()) as loader:
    batches = ordering.echo.repeat(loader, policy)
    for _ in batches:
        fresh.append(batches.fresh)
        time.sleep(0.005)
plan = ordering.echo.EchoPlan(fresh, "measured")
plan.check_same()
with open(f"loads{rank}", "w") as file:
    file.write(f"{plan.loads} {plan.digest()}")
jax.distributed.shutdown()
"""


@pytest.mark.slow
def test_two_processes_load_in_the_same_steps(tmp_path):
    (tmp_path / "child.py").write_text(PROCESS)
    assert start_two("child", folder=tmp_path) == 0
    first, second = ((tmp_path / f"loads{rank}").read_text() for rank in (0, 1))
    assert first == second
    # Process 0 alone would have loaded in every step.
    assert 1 < int(first.split()[0]) < 60
