"""A run with one plan that goes on with another: as the plain loop, or refused by name."""

import functools
import random
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ordering
from ordering import echo
from ordering.echo import stream
from tests import tables
from tests.cases import mostly_slow
from tests.waiting import TIMEOUT

KEY, UNITS = jax.random.key(7), 12
TABLE = tables.whole_numbers((64, 3)).astype(np.float32)
ORDERS = {  # the order, units of a step, workers
    "shuffled": ("random_reshuffling", 4, None),
    "computed": ("counted", 4, None),
    "observes": ("grab", 4, None),
    "a short last step": ("grab", 5, None),
    "two workers": ("pair_balance", 4, 2),
}


@functools.cache
def order_of(name):
    make = getattr(ordering, ORDERS[name][0])
    return make(UNITS, units_per_step=ORDERS[name][1])


def read(name, state=None):
    workers = ORDERS[name][2]
    data, like = np.arange(UNITS * (workers or 1)), jnp.zeros(3)
    return ordering.data.read_epochs(
        data, order_of(name), KEY, like=like, workers=workers, state=state
    )


def gradients(x):
    return jnp.asarray(TABLE)[x]


@functools.cache
def batch_of(name, load):
    """The batches of a run that uses each once; the order does not depend on further uses."""
    reads, batches = read(name), []
    for _ in range(24):
        batches.append(np.asarray(next(reads)))
        reads.observe(gradients(batches[-1])) if reads.observes else None
    return batches


def plain_loop(name, decisions, parts):
    """(step, load, whether it was fresh, examples) of every step."""
    load, use, steps = -1, 0, []
    for fresh in decisions:
        load, use = (load + 1, 0) if fresh else (load, use + 1)
        batch = batch_of(name, 0)[load]
        rows = np.arange(batch.shape[-1])
        if use and parts > 1:
            key = jax.random.fold_in(jax.random.fold_in(KEY, load), use)
            rows = np.asarray(jax.random.permutation(key, len(rows)))
        for chosen in np.split(rows, parts):
            steps.append((len(steps), load, fresh, batch[..., chosen].tolist()))
    return steps


def run(batches, most, *, observe_last=True):
    """The next steps."""
    steps = []
    while len(steps) < most and (x := next(batches, None)) is not None:
        steps.append((batches.step, batches.load, batches.fresh, x.tolist()))
        if len(steps) < most or observe_last:
            batches.observe(gradients(x))
    return steps


def saved(state):
    """A state as dicts, as a checkpoint gives it."""
    if hasattr(state, "_asdict"):  # without empty trees
        parts = state._asdict().items()
        return {name: saved(part) for name, part in parts if jax.tree.leaves(part)}
    return jax.tree.map(np.asarray, state)


def plan_of(draw, length, of=None):
    """A plan or a policy; of another one it may have the first decisions."""
    kind = draw.choice(["drawn", "fixed", "endless", "adaptive", "like", "like", "replayed"])
    factor = draw.randint(1, 4)
    if kind == "fixed":
        return echo.fixed(factor, total_steps=length)
    if kind == "endless":
        return echo.fixed(factor)
    if kind == "adaptive":
        return echo.adaptive(max_factor=factor)
    fresh = [t == 0 or draw.random() < 0.4 for t in range(length)]
    if of is not None and kind == "like":
        fresh[: len(of)] = of[:length]
    if of is not None and kind == "replayed":
        return echo.adaptive(max_factor=factor, decided=of, total_steps=max(length, len(of)))
    return echo.EchoPlan(fresh)


def goes_on(plan, made, state):
    """Whether the plan has decided the same, and what it decides next can be done."""
    same = plan.before(len(made)).tolist() == made[: len(plan.before(len(made)))]
    ends = plan.total_steps is not None and len(made) >= plan.total_steps
    if not same or state["uses"] or state["done"] or ends:
        return same and not len(made) > (plan.total_steps or len(made))
    return plan.decide(len(made), uses=plan.place(len(made))[1], ready=lambda: False)


@pytest.mark.parametrize("seed", mostly_slow(range(10), quick=[0]))
def test_a_plan_goes_on_where_another_stopped_or_is_refused(seed):
    draw, refused = random.Random(seed), 0
    for _ in range(30):
        name, parts = draw.choice([*ORDERS]), draw.choice([1, 1, 2])
        if UNITS % ORDERS[name][1]:
            parts = 1
        options = {"minibatches": parts, "key": KEY}
        first = echo.repeat(read(name), plan_of(draw, draw.randint(1, 8)), **options)
        stop = draw.randint(0, 9 * parts)
        before = run(first, stop, observe_last=draw.random() < 0.8)
        state, made = saved(first.state()), [step[2] for step in before[::parts]]
        plan = plan_of(draw, draw.randint(1, 12), made or None)
        try:
            rest = echo.repeat(read(name, state), plan, **options)
        except ValueError as error:
            assert "plan" in str(error)
            assert not goes_on(plan, made[: state["steps"] + (state["done"] > 0)], state), error
            refused += 1
            continue
        kept = before[: rest.step + 1]
        assert len(before) - len(kept) <= 1
        steps = kept + run(rest, 20 * parts - len(kept))
        decisions = [step[2] for step in steps[::parts]]
        assert steps == plain_loop(name, decisions, parts)
        given = plan.before(len(decisions)).tolist()
        assert given == decisions[: len(given)], "the plan's own decisions, from its first step on"
        assert plan.total_steps in (None, len(decisions))
    assert 3 < refused < 20


def after(plan, steps, *, units=4, source=None, **options):
    """The state of a run that read examples of a shuffled order, after so many steps."""
    batches = echo.repeat(shuffled(units, source=source), plan, **options)
    for _ in range(steps):
        next(batches)
    return batches.state()


def shuffled(units=4, *, state=None, source=None, **options):
    order = ordering.random_reshuffling(UNITS, units_per_step=units)
    source = np.arange(UNITS) if source is None else source
    return ordering.data.read_epochs(source, order, KEY, state=state, **options)


TWICE = {"minibatches": 2, "key": KEY}
OTHERS = {  # what goes on with a state, and what the refusal names
    "another plan": (
        lambda: echo.repeat(shuffled(state=after(echo.fixed(2), 4)), echo.fixed(3)),
        "first 4 decisions",
        "pass the run's plan or a longer one",
    ),
    "a shorter plan": (
        lambda: echo.repeat(shuffled(state=after(echo.fixed(2), 4)), echo.fixed(2, total_steps=3)),
        "first 4 decisions",
    ),
    "a run that used each batch once": (
        lambda: echo.repeat(read_some(4), echo.fixed(2)),
        "first 4 decisions",
    ),
    "a reader alone": (
        lambda: next(shuffled(state=after(echo.fixed(2), 3))),
        "ordering.echo.repeat",
    ),
    "larger batches": (
        lambda: echo.repeat(shuffled(6, state=after(echo.fixed(2), 3)), echo.fixed(2)),
        "unit 4",
        "units_per_step",
    ),
    "another key inside a use": (
        lambda: echo.repeat(
            shuffled(state=after(echo.fixed(2), 3, **TWICE)),
            echo.fixed(2),
            minibatches=2,
            key=jax.random.key(8),
        ),
        "inside a use",
        "key",
    ),
    "a state without its counts": (
        lambda: echo.repeat(shuffled(state={"reads": shuffled().state()}), echo.fixed(2)),
        "state has no",
        "pass what",
    ),
    "gradients that were not saved": (
        lambda: echo.repeat(read("observes", inside_a_first_use(rows=())), echo.fixed(2), **TWICE),
        "state has no rows",
    ),
    "a batch that is gone": (
        lambda: echo.repeat(
            shuffled(state=late_at_an_epochs_end()), echo.EchoPlan([True] * 3 + [False])
        ),
        "step 3",
        "uses a batch again",
    ),
}


def inside_a_first_use(**changes):
    batches = echo.repeat(read("observes"), echo.fixed(2), **TWICE)
    run(batches, 1)
    return saved(batches.state()._replace(**changes))


def read_some(count):
    reads = shuffled()
    for _ in range(count):
        next(reads)
    return reads


class Late:
    """A pipeline that waits at its first batch of an epoch."""

    def __init__(self, epoch):
        self.epoch, self.go_on = epoch, threading.Event()

    def __call__(self, indices, first_step, epoch):
        if epoch == self.epoch:
            self.go_on.wait(TIMEOUT)
        yield from np.split(np.asarray(indices), len(indices) // 4)


def retry(batches):
    while True:
        try:
            return next(batches)
        except ordering.data.LoadError:
            pass


def late_at_an_epochs_end():
    """The state where the first batch of the second epoch has not come in time."""
    source = Late(epoch=1)
    batches = echo.repeat(shuffled(source=source, timeout=0.2), echo.EchoPlan([True] * 4))
    for _ in range(3):
        retry(batches)
    with pytest.raises(ordering.data.LoadError, match="load 3 did not come"):
        next(batches)
    source.go_on.set()
    return batches.state()


@pytest.mark.parametrize("name", OTHERS)
def test_what_a_state_is_not_of_is_named(name):
    call, *words = OTHERS[name]
    with pytest.raises(ValueError) as error:
        call()
    assert all(word in str(error.value) for word in words), error.value


def test_a_late_load_is_decided_once_and_the_constructor_reads_nothing(monkeypatch):
    """So that processes whose loads are late ask each other as often as those whose are not."""
    asked = []
    monkeypatch.setattr(stream, "ready_everywhere", lambda ready: asked.append(ready) or True)
    state, source = after(echo.fixed(3), 4), Late(epoch=0)
    batches = echo.repeat(
        shuffled(state=state, source=source, timeout=0.05), echo.adaptive(max_factor=9)
    )
    for _ in range(2):  # the batch that is used again
        with pytest.raises(ordering.data.LoadError, match="load 1 did not come"):
            next(batches)
    assert not asked
    jax.tree.map(np.testing.assert_array_equal, batches.state(), state)
    source.go_on.set()
    first = retry(batches)
    assert asked == [False] or asked == [True]
    assert (batches.step, batches.load, batches.fresh, first.shape) == (4, 2, True, (4,))


def test_blocks_go_on_between_uses_when_a_step_adds_the_gradients_itself():
    """The order observes at the end of a window, and nothing is left for it inside."""
    blocks = ordering.blocks.split(np.arange(24), unit_size=2)
    order = ordering.grab(12, units_per_step=4)

    def repeated(state=None):
        like = jnp.zeros(3)
        reads = ordering.blocks.read_blocks(
            blocks, order, KEY, batch_size=2, like=like, state=state
        )
        return echo.repeat(reads, echo.fixed(2))

    batches = repeated()
    whole = [(batches.step, batches.load, np.asarray(next(batches)[0]).tolist()) for _ in range(6)]
    for stop in range(1, 6):
        batches = repeated()
        for _ in range(stop):
            next(batches)
        batches = repeated(batches.state())
        rest = [
            (batches.step, batches.load, np.asarray(next(batches)[0]).tolist())
            for _ in range(stop, 6)
        ]
        assert rest == whole[stop:]


def test_policies_are_equal_if_they_decide_the_same():
    make = echo.adaptive
    assert make(max_factor=2, decided=[True, False]) == make(max_factor=2, decided=[True, False])
    assert make(max_factor=2, decided=[True, False]) != make(max_factor=2, decided=[True, True])
    assert len({echo.fixed(2), echo.fixed(2), echo.fixed(3)}) == 2
