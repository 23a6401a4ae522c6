"""The three decisions in one loop: equal to a slow reference, and to itself after a stop."""

import contextlib
import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl import flags

import local_opt
from experiments import train
from experiments.processes import interrupts
from experiments.studies.tables import ECHO_POLICIES, ORDERS, SYNC_RULES
from experiments.training import checkpoint, config, loop, program, run
from experiments.training.loop import Progress
from local_opt import runners
from ordering.echo import EchoPlan, measured
from tests import reference
from tests.test_one_loop import RECIPE, STEPS, WORKERS, task

# Pairs are split over steps, and the last step of an epoch has two units.
UNITS, PER_STEP = 11, 3
SETTING = RECIPE._replace(
    schedule="cosine", floor=0.01, warmup_steps=3, h_base=2, growth=1.5, echo_factor=3
)
SIZES = config.Sizes(WORKERS, UNITS, PER_STEP, 1)
STREAMED = {"reads": "thread"}


def plans_of(sync="qsr", echo="diffusion_cosine", seed=0, **fields):
    own = config.config_of(SETTING._replace(**fields), SIZES, seed=seed)
    return config.plans_of(own, SYNC_RULES[sync], ECHO_POLICIES[echo], rate=0.3)


@functools.cache
def built(order="cd_grab", sync="qsr", reads=None, mesh=False):
    mesh = runners.worker_mesh(WORKERS) if mesh else None
    rounds = SYNC_RULES[sync].rounds
    return program.build(task(), SETTING, ORDERS[order], rounds, reads=reads, mesh=mesh, epochs=15)


def sums(state):
    """In place of an evaluation: a number that every bit of the parameters changes."""
    leaves = map(np.asarray, jax.tree.leaves(jax.device_get(state.params)))
    return {"train/loss": float(sum(np.abs(leaf, dtype=np.float64).sum() for leaf in leaves))}


def trained(prepared, plans, **options):
    found = []
    given = {"seed": 0, "evaluate": sums, "evaluate_at": range(12, STEPS, 12)} | options
    outcome = run.train(prepared, plans, on_record=found.append, **given)
    return outcome, found


def assert_same(one, other):
    def same(a, b):
        if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        np.testing.assert_array_equal(a, b)

    jax.tree.map(same, one, other)


def timeless(records):
    return [{k: v for k, v in r.items() if k != "seconds"} for r in records]


def slow_run(plans, start):
    """The loop by hand, worker by worker: (parameters, all orders)."""
    model, train = task().model, task().train
    grad = jax.jit(jax.grad(lambda p, batch: jnp.mean(model.loss(p, batch, None))))
    units = np.arange(WORKERS * UNITS).reshape(WORKERS, UNITS)

    def flat(tree):
        return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(tree)])

    first = jax.tree.map(lambda p: np.asarray(p[0], np.float64), start.params)
    shapes, treedef = jax.tree.flatten(first)
    params = [flat(first) for _ in range(WORKERS)]
    momentum = [np.zeros_like(params[0]) for _ in range(WORKERS)]
    current, load, orders, seen = np.asarray(start.orders.current), 0, [], None

    def gradient(vector, examples):
        parts = np.split(vector, np.cumsum([s.size for s in shapes])[:-1])
        leaves = [np.float32(p.reshape(s.shape)) for p, s in zip(parts, shapes, strict=True)]
        batch = {name: values[examples] for name, values in train.items()}
        return np.float64(flat(grad(jax.tree.unflatten(treedef, leaves), batch)))

    for t in range(STEPS):
        if plans.echo.fresh[t]:
            if load % 4 == 0:
                if load:
                    current = reference.cd_grab_epoch(current, seen)
                orders.append(current)
                seen = np.zeros((WORKERS, UNITS, params[0].size))
            places = slice(load % 4 * PER_STEP, (load % 4 + 1) * PER_STEP)
            load += 1
        for w in range(WORKERS):
            mine = current[w][places]
            examples = units[w][mine]
            if plans.echo.fresh[t]:
                seen[w, mine] = [gradient(params[w], [e]) for e in examples]
            g = gradient(params[w], examples) + SETTING.weight_decay * params[w]
            momentum[w] = SETTING.momentum * momentum[w] + g
            params[w] = params[w] - plans.rates[t] * momentum[w]
        if plans.sync.syncs_after(t):
            params = [np.mean(params, axis=0)] * WORKERS
    return params[0], np.stack(orders)


def test_the_loop_equals_a_slow_reference():
    plans, found = plans_of(), []
    params, orders = slow_run(plans, built().init(0))
    begun = plans.echo.load_steps[::4]  # before the first load of every epoch

    def keep(state):
        found.append(np.asarray(state.orders.current))
        return {}

    outcome, records = trained(built(), plans, evaluate=keep, evaluate_at=begun)
    np.testing.assert_array_equal(found[: len(begun)], orders)
    assert len(np.unique(orders[:, 0], axis=0)) > 8  # so the orders do change
    flat = np.concatenate([np.ravel(leaf[1]) for leaf in jax.tree.leaves(outcome.state.params)])
    np.testing.assert_allclose(flat, params, rtol=2e-4, atol=2e-5)  # 60 steps of float32
    assert [r["step"] for r in records] == [*begun, STEPS]
    last, loads, rounds = records[-1], plans.echo.loads, plans.sync.rounds
    assert (last["loads"], last["rounds"], last["allreduces"]) == (loads, rounds, rounds)
    assert last["epoch"] == loads / 4 and last["ended"] and last["drift"] > 0


@pytest.mark.parametrize("reads", ["thread", "tfdata"])
@pytest.mark.parametrize("order", ["cd_grab", "rr", "dealt"])
def test_streamed_batches_are_those_on_the_devices(order, reads):
    if reads == "tfdata":
        pytest.importorskip("tensorflow")
    outcome, records = trained(built(order), plans_of())
    other, same = trained(built(order, reads=reads), plans_of())
    assert_same(outcome.state, other.state)
    assert timeless(records) == timeless(same)


def test_workers_on_a_mesh_equal_simulated_ones():
    outcome, records = trained(built(), plans_of())
    other, same = trained(built(mesh=True), plans_of())
    np.testing.assert_array_equal(outcome.state.orders.current, other.state.orders.current)
    for one, two in zip(records, same, strict=True):
        np.testing.assert_allclose(one["train/loss"], two["train/loss"], rtol=1e-5)


def compiled(prepared):
    """How often what a run needs was compiled: steps, syncs and epochs' ends, by their kind."""
    return [prepared.steps(*kind)._cache_size() for kind in STEPS_OF] + [
        prepared.ends(*kind)._cache_size() for kind in ENDS_OF
    ]


STEPS_OF = [(True, 3), (True, 2), (False, 3), (False, 2)]  # fresh, units
ENDS_OF = [(True, False), (False, True), (True, True)]  # sync, epoch_end


def test_a_run_compiles_everything_once():
    trained(built(), plans_of())
    assert compiled(built()) == [1] * 7
    trained(built(), plans_of(seed=1), seed=1)
    assert compiled(built()) == [1] * 7


def test_a_record_can_end_the_run():
    outcome, records = trained(built(), plans_of(), ends=lambda record: record["step"] >= 24)
    assert outcome.step == 24 and [r["ended"] for r in records] == [False, True]


class Killed(BaseException):
    pass


def stopping(step, signal=0):
    """In place of signals: the host looks at every step, and one of them stops or kills the run."""

    @contextlib.contextmanager
    def caught():
        steps = iter(range(1, STEPS))

        def ask(wants_to_save):
            if next(steps, None) != step:
                return 0, wants_to_save
            if not signal:
                raise Killed
            return signal, wants_to_save

        yield ask

    return caught


def stopped_at(monkeypatch, folder, prepared, plans, step, signal):
    """The records of a run that was stopped after a step and went on, and how it ended."""
    saving = run.Saving(str(folder), every=7, at_end=True)
    options = {"evaluate_at": range(5, STEPS, 5), "saving": saving}
    found = []
    with monkeypatch.context() as patch:
        patch.setattr(loop, "LEAST", 1)
        patch.setattr(loop, "MOST", 1)
        patch.setattr(interrupts, "caught", stopping(step, signal))
        with contextlib.ExitStack() as stack:
            if not signal:
                stack.enter_context(pytest.raises(Killed))
            outcome = run.train(
                prepared, plans, seed=0, evaluate=sums, on_record=found.append, **options
            )
            assert (outcome.stopped, outcome.step) == (signal, step)
    at = checkpoint.latest(saving.folder)
    assert at == (step if signal else (step - 1) // 7 * 7)
    kept = [r for r in found if r["step"] <= at]  # as the studies do
    outcome, new = trained(prepared, plans, **options)
    return outcome, timeless(kept + new)


def test_a_run_killed_or_stopped_at_ten_steps_ends_bitwise_the_same(tmp_path, monkeypatch):
    plans = plans_of()
    whole, records = trained(built(), plans, evaluate_at=range(5, STEPS, 5))
    chosen = np.random.default_rng(6).choice(np.arange(1, STEPS), 10, replace=False)
    assert any(not plans.sync.syncs_after(s - 1) for s in chosen), "inside a round"
    assert any(plans.echo.loads_before(s) % 4 for s in chosen), "inside an epoch"
    assert any(not plans.echo.fresh[s] for s in chosen), "before an echoed step"
    before = compiled(built())
    for number, step in enumerate(chosen.tolist()):
        outcome, found = stopped_at(
            monkeypatch, tmp_path / str(step), built(), plans, step, signal=number % 2 * 15
        )
        assert (outcome.step, outcome.stopped) == (STEPS, 0)
        assert_same(outcome.state, whole.state)
        assert found == timeless(records)
    # A restored state is what the steps were compiled for.
    assert compiled(built()) == before
    # What has ended does nothing when it is called again.
    again, nothing = trained(
        built(), plans, saving=run.Saving(str(tmp_path / str(chosen[0])), at_end=True)
    )
    assert again.step == STEPS and not nothing
    assert_same(again.state, whole.state)


@pytest.mark.parametrize("order,sync", [("dealt", "qsr"), ("rr", "parallel"), ("cd_grab", "qsr")])
def test_a_run_that_reads_goes_on_in_the_middle_of_an_epoch(tmp_path, monkeypatch, order, sync):
    prepared, plans = built(order, sync, **STREAMED), plans_of(sync)
    whole, records = trained(prepared, plans, evaluate_at=range(5, STEPS, 5))
    for step, signal in ((23, 15), (38, 0)):
        outcome, found = stopped_at(
            monkeypatch, tmp_path / str(step), prepared, plans, step, signal
        )
        assert_same(outcome.state, whole.state)
        assert found == timeless(records)


def test_every_step_can_be_the_last_before_a_stop():
    """Without files: from the state after any step, the rest is the same."""
    plans = plans_of(echo="bernoulli_cosine", seed=3)
    kept = {}

    def keep(at, state):
        kept[at] = jax.tree.map(jnp.copy, state)
        return state

    def go_on(at, state, hook=lambda at, state: state, stops=()):
        return loop.run(built(), plans, state, at, hook, seed=0, stops=stops)

    _, end = go_on(Progress(), built().init(0), keep, range(1, STEPS, 4))
    at_stops = {at: state for at, state in kept.items() if at.step % 4 == 1}
    assert len(at_stops) == 15
    for at, state in at_stops.items():
        assert at == loop.resumed(plans, at.step)
        reached, again = go_on(at, state)
        assert (reached.step, reached.loads) == (STEPS, plans.echo.loads)
        assert_same(again, end)


@pytest.fixture
def jittery(monkeypatch):
    """Input that is ready by coins of a seed; the loads are then the same on every machine."""
    coins = iter(np.random.default_rng(2).random(10_000))
    monkeypatch.setattr(loop, "ready_everywhere", lambda ready: next(coins) < 0.4)


def online(decided=()):
    return measured(total_steps=STEPS, max_factor=12, decided=decided)


def test_what_was_measured_is_recorded_resumed_and_replayed(tmp_path, monkeypatch, jittery):
    prepared = built(**STREAMED)
    plans = plans_of()._replace(echo=online())
    options = {"evaluate_at": range(5, STEPS, 5)}
    whole, records = trained(prepared, plans, **options)
    decided = np.array(whole.decided)
    plan = EchoPlan(decided, "measured")
    assert len(decided) == STEPS and 10 < plan.loads < 40 and plan.loads % 4
    assert records[-1]["load_steps"] == np.flatnonzero(decided).tolist()
    assert not any("load_steps" in r for r in records[:-1])
    # In one that is stopped the input is as it was; nothing else is told.
    known = plans._replace(echo=online(decided))
    for step, signal in ((17, 15), (44, 0)):
        outcome, found = stopped_at(
            monkeypatch, tmp_path / str(step), prepared, known, step, signal
        )
        assert outcome.decided == whole.decided
        assert_same(outcome.state, whole.state)
        assert found == timeless(records)
    replayed, found = trained(prepared, plans._replace(echo=plan), **options)
    assert_same(replayed.state, whole.state)
    records[-1].pop("load_steps")
    assert timeless(found) == timeless(records)


def test_where_loads_are_not_known_workers_meet_before_each(jittery):
    """Its rounds are those of one sync per load, each counted when the next load begins."""
    prepared = built(**STREAMED)
    plans = plans_of("every_load", "measured")
    assert plans.sync is None
    outcome, records = trained(prepared, plans, evaluate_at=range(1, STEPS))
    assert [r["step"] for r in records] == list(range(1, STEPS + 1)), "one record each"
    assert all(r["rounds"] == r["loads"] - 1 for r in records)
    fresh = np.array(outcome.decided)
    replay = plans._replace(echo=EchoPlan(fresh), sync=local_opt.sync_every_load(fresh))
    other, same = trained(prepared, replay, evaluate_at=range(1, STEPS))
    for r in same:
        r["rounds"] -= int(r["step"] == STEPS or fresh[r["step"]])
    for name in ("loads", "rounds", "train/batch_loss"):
        assert [r[name] for r in records] == [r[name] for r in same], name
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6),
        prepared.mean_params(outcome.state), prepared.mean_params(other.state),
    )  # fmt: skip


def test_a_real_loader_decides_when_its_batches_are_ready():
    plans = plans_of(echo="measured")
    outcome, records = trained(built(**STREAMED), plans, delay=0.002)
    loads = int(np.sum(outcome.decided))
    assert records[-1]["loads"] == loads and len(outcome.decided) == STEPS
    assert records[-1]["seconds"] >= 0.002 * loads


def test_a_checkpoint_of_other_plans_is_refused(tmp_path):
    saving = run.Saving(str(tmp_path), at_end=True)
    trained(built(), plans_of(), saving=saving)
    for other, name in (
        (plans_of(echo="fixed"), "echo"),
        (plans_of(sync="constant"), "sync"),
        (plans_of(floor=0.02, growth=1.51), "learning rate"),
    ):
        with pytest.raises(ValueError, match=f"step 60 belongs to another {name} plan: give"):
            trained(built(), other, saving=saving)


class Source:
    """Random access to examples, with another view of every epoch."""

    def __init__(self, data):
        self.data, self.epochs = data, []

    def __len__(self):
        return len(self.data["y"])

    def __getitem__(self, i):
        return {name: values[i] for name, values in self.data.items()}

    def at_epoch(self, epoch):
        self.epochs.append(epoch)
        return self


@pytest.mark.parametrize("order", ["cd_grab", "dealt"])
def test_a_source_trains_as_arrays_do(order):
    source = Source(task().train)
    rounds = SYNC_RULES["qsr"].rounds
    read = program.build(task()._replace(train=source), SETTING, ORDERS[order], rounds, epochs=15)
    plans = plans_of()
    outcome, _ = trained(built(order), plans)
    other, _ = trained(read, plans)
    assert_same(outcome.state, other.state)
    per_epoch = read.sizes.loads_per_epoch
    assert set(range(-(-plans.echo.loads // per_epoch))) <= set(source.epochs)


def test_what_is_not_finite_ends_the_run_and_is_named(tmp_path):
    saving = run.Saving(str(tmp_path), every=7)
    plans = plans_of()
    outcome, records = trained(built(), plans._replace(rates=np.full(STEPS, 1e38)), saving=saving)
    message = r"unit \d+ of worker \d is not finite in step \d \(last mean loss: .* Lower the"
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(outcome.diverged)
    assert outcome.state is None and outcome.diverged == records[-1]["diverged"]
    assert [r["ended"] for r in records] == [True] and not checkpoint.latest(saving.folder)


@pytest.mark.parametrize(
    "fields,message",
    [
        ({"warmup_steps": 60}, r"--warmup_steps is 60 of 60 steps: .* lower the warmup"),
        ({"growth": 0.0}, r"--growth is 0.0: alpha / peak rate of QSR must be positive"),
        ({"total_steps": 0, "warmup_steps": 0}, r"is 0 of 0 steps: .* Raise --total_steps"),
    ],
)
def test_bad_plans_are_named(fields, message):
    with pytest.raises(ValueError, match=message):
        plans_of(**fields)


def test_bad_input_is_named():
    plans = plans_of()
    with pytest.raises(ValueError, match="60 steps and the run 59"):
        trained(built(), plans._replace(rates=plans.rates[:-1]))
    for fields, message in (
        ({"workers": 64}, "64 workers with 3 units of 1 examples need at least 64"),
        ({"workers": 0}, "--workers is 0: pass a whole number >= 1"),
        ({"units_per_step": 12}, "units_per_step is 12"),
    ):
        with pytest.raises(ValueError, match=message):
            config.sizes_of(task(), SETTING._replace(**fields))
    with pytest.raises(ValueError, match="need at least 51 examples; the training set has 46"):
        config.sizes_of(task(), SETTING._replace(workers=17), deals=True)
    with pytest.raises(ValueError, match="CD-GraB coordinates workers in every step, and workers"):
        program.build(
            task(), SETTING._replace(run="turns"), ORDERS["cd_grab"], SYNC_RULES["qsr"].rounds
        )


def test_help_shows_every_flag_of_the_program():
    values = flags.FlagValues()
    train.define_flags(values)
    shown = {flag.name for flag in values.get_key_flags_for_module(sys.argv[0])}
    assert shown == set(values)
    assert {"order", "workers", "tensorboard", "coordinator_address"} < shown
