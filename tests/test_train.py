"""The three decisions in one loop: equal to a slow reference, and to itself after a stop."""

import collections
import contextlib
import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from absl import flags

import local_opt
import models
import ordering
from experiments import (
    checkpoints,
    interrupts,
    loads,
    loop,
    resumable,
    run_setting,
    train,
    volume,
    whole,
)
from experiments.methods import METHODS, Setting
from experiments.sync_rules import RULES
from experiments.tasks import Recipe, Task
from local_opt import runners
from tests import reference

WORKERS, UNITS, PER_STEP, STEPS = 4, 11, 3, 60  # pairs are split over steps, a unit is left over
RECIPE = Recipe(WORKERS, PER_STEP, 1, 20, (0.3,), 0.9, 0, weight_decay=1e-3)


def task():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(WORKERS * UNITS + 2, 5)).astype(np.float32)
    y = (x[:, :3].argmax(axis=1)).astype(np.int32)
    model = models.softmax_regression(num_features=5, num_classes=3, l2=0.0)
    data = {"x": x, "y": y}
    return Task("random", model, data, data, RECIPE)


def plans_of(*, sync="qsr", echo="diffusion_cosine", seed=0):
    decisions = run_setting.Decisions(
        sync=sync, echo=echo, total_steps=STEPS, schedule="cosine", floor=0.01, warmup_steps=3,
        h_base=2, growth=1.5, h_max=None, echo_factor=3,
    )  # fmt: skip
    per_epoch = -(-UNITS // PER_STEP)
    return run_setting.plans_of(decisions, RECIPE, per_epoch, rate=0.3, seed=seed)


def built(order="cd_grab", sync="qsr", **options):
    setup = run_setting.setup_of(RECIPE)
    return whole.build(task(), METHODS[order], RULES[sync].rounds, setup, epochs=15, **options)


@pytest.fixture(scope="module")
def program():
    return built()


@pytest.fixture(scope="module")
def streamed():
    return built(streamed=True)


def trained(program, plans, **options):
    found = []
    at, state = loop.train(
        program, plans, program.init(0), evaluations=5, on_record=found.append, **options
    )
    assert at.step == STEPS
    return state, found


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
            g = gradient(params[w], examples) + RECIPE.weight_decay * params[w]
            momentum[w] = RECIPE.momentum * momentum[w] + g
            params[w] = params[w] - plans.rates[t] * momentum[w]
        if plans.sync.syncs_after(t):
            params = [np.mean(params, axis=0)] * WORKERS
    return params[0], np.stack(orders)


def test_the_loop_equals_a_slow_reference(program):
    plans = plans_of()
    params, orders = slow_run(plans, program.init(0))
    kept = {}

    def keep(at, state, seen):
        kept[at.step] = np.asarray(state.orders.current)

    saving = loop.Saving(due=lambda step: True, save=keep)
    state, records = trained(program, plans, saving=saving)
    found = np.stack([kept[step + 1] for step in plans.echo.load_steps[::4]])
    np.testing.assert_array_equal(found, orders)
    assert len(np.unique(orders[:, 0], axis=0)) > 8  # so the orders do change
    flat = np.concatenate([np.ravel(leaf[1]) for leaf in jax.tree.leaves(state.params)])
    np.testing.assert_allclose(flat, params, rtol=2e-4, atol=2e-5)  # 60 steps of float32
    last = records[-1]
    assert (last["step"], last["loads"], last["rounds"]) == (
        60,
        plans.echo.loads,
        plans.sync.rounds,
    )
    assert last["epoch"] == plans.echo.loads / 4
    assert last["sent"] == plans.sync.rounds + program.order_sent(plans.echo.loads)
    assert [r["step"] for r in records] == [12, 24, 36, 48, 60]


def test_streamed_batches_are_those_on_the_devices(program, streamed):
    plans = plans_of()
    state, records = trained(program, plans)
    other, same = trained(streamed, plans)
    assert_same(state, other)
    assert timeless(records) == timeless(same)


def test_workers_on_a_mesh_equal_simulated_ones(program):
    plans = plans_of()
    state, records = trained(program, plans)
    other, same = trained(built(mesh=runners.worker_mesh(WORKERS)), plans)
    np.testing.assert_array_equal(state.orders.current, other.orders.current)
    for one, two in zip(records, same, strict=True):
        np.testing.assert_allclose(one["train_loss"], two["train_loss"], rtol=1e-5)


def test_a_run_compiles_every_step_once(program):
    trained(program, plans_of())
    before = [f._cache_size() for f in (program.fresh, program.echoed, program.meet)]
    trained(program, plans_of(seed=1))
    assert [f._cache_size() for f in (program.fresh, program.echoed, program.meet)] == before
    assert before == [2, 2, 1]  # the last step of an epoch has two units


def collectives(jaxpr):
    """{name of a collective: float32 numbers that one device hands over}, all steps added."""
    found = collections.Counter()
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in ("all_to_all", "psum", "psum_invariant", "all_gather"):
            found[eqn.primitive.name] += sum(v.aval.size for v in eqn.invars)
        for inner in jax.tree.leaves(
            list(eqn.params.values()), is_leaf=lambda v: hasattr(v, "eqns")
        ):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                found += collectives(inner)
    return found


@pytest.mark.parametrize("per_step,size", [(1, 1), (2, 2), (3, 3), (3, 2), (4, 4), (4, 3), (4, 1)])
def test_what_an_order_sends_is_what_its_step_does(per_step, size):
    units = 2 * per_step + size % per_step  # the last step of an epoch may be the shorter one
    order = METHODS["cd_grab"].make(Setting(units, per_step, WORKERS, 5))
    params = jnp.zeros(18)

    def step(state, rows):
        return (order.observe(state, ordering.Rows.of(rows)),)

    mesh = runners.over_mesh(runners.worker_mesh(WORKERS))
    init = mesh(lambda key: (order.init(key, params),), owned_in=(True,), owned_out=(True,))
    state = jax.eval_shape(init, jax.random.split(jax.random.key(0), WORKERS))[0]
    rows = jax.ShapeDtypeStruct((WORKERS, size, 18), jnp.float32)
    observe = mesh(step, owned_in=(True, True), owned_out=(True,))
    found = collectives(jax.make_jaxpr(observe)(state, rows).jaxpr)
    # Of n numbers an all-to-all sends (W - 1) / W n, an all-reduce 2 (W - 1) / W n.
    sent = found["all_to_all"] / 2 / 18 + (found["psum"] + found["psum_invariant"]) / 18
    sizes = loads.Sizes(WORKERS, units, per_step, 1)
    assert volume.step_sent(size, sizes, 18) == pytest.approx(sent)


def test_the_short_last_step_of_an_epoch_sends_less():
    sizes = loads.Sizes(WORKERS, UNITS, 4, 1)  # 4, 4 and 3 units
    sent = volume.order_sent(METHODS["cd_grab"], sizes, 18)
    whole, last = (volume.step_sent(size, sizes, 18) for size in (4, 3))
    assert sent(7) == pytest.approx(2 * (2 * whole + last) + whole)
    assert volume.order_sent(METHODS["id_pair"], sizes, 18)(7) == 0


class Killed(BaseException):
    pass


def stopping(step, killed):
    """In place of signals: stop, or die, after a step."""

    @contextlib.contextmanager
    def caught():
        def stop(now):
            if killed and now == step:
                raise Killed
            return now == step

        yield stop, [15]

    return caught


def run_in(folder, program, plans):
    done = []
    if (folder / "metrics.jsonl").exists():
        done = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return resumable.train_in(
        str(folder), program, plans, seed=0, evaluations=12, checkpoint_every=7, done=done
    )


def result(folder, program, plans):
    with checkpoints.opened(str(folder)) as manager:
        at, state, _ = checkpoints.restore(manager, plans, program.init(0))
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return at, state, timeless(records)


def test_a_run_killed_or_stopped_at_ten_steps_ends_bitwise_the_same(tmp_path, monkeypatch, program):
    plans = plans_of()
    assert run_in(tmp_path / "whole", program, plans) == 0
    at, state, records = result(tmp_path / "whole", program, plans)
    with ocp.StandardCheckpointer() as checkpointer:
        model = checkpointer.restore(tmp_path / "whole" / "model")
    assert_same(model, local_opt.consolidate(state.params))
    assert at.step == STEPS and len(records) == 12
    chosen = np.random.default_rng(6).choice(np.arange(1, STEPS), 10, replace=False)
    inside_round = [not plans.sync.syncs_after(s - 1) for s in chosen]
    inside_epoch = [plans.echo.loads_before(s) % 4 != 0 for s in chosen]
    echoes = [not plans.echo.fresh[s] for s in chosen]
    assert any(inside_round) and any(inside_epoch) and any(echoes)
    for number, step in enumerate(chosen):
        folder = tmp_path / str(step)
        with monkeypatch.context() as patch:
            patch.setattr(interrupts, "caught", stopping(step, killed=number % 2 == 1))
            if number % 2:
                with pytest.raises(Killed):
                    run_in(folder, program, plans)
            else:
                assert run_in(folder, program, plans) == 15
        compiled = program.fresh._cache_size()
        assert run_in(folder, program, plans) == 0
        assert program.fresh._cache_size() == compiled
        again = result(folder, program, plans)
        assert again[0][:3] == at[:3]
        assert_same(again[1], state)
        assert again[2] == records


def test_every_step_can_be_the_last_before_a_stop(program):
    """Without files: from the state after any step, the rest is the same."""
    plans = plans_of(echo="bernoulli_cosine", seed=3)
    state, records = trained(program, plans)
    kept = []

    def keep(at, state, seen):
        kept.append((at, jax.tree.map(jnp.copy, state), seen))

    trained(program, plans, saving=loop.Saving(due=lambda step: step % 4 == 1, save=keep))
    for at, middle, seen in kept:
        found = []
        at = loop.resumed(plans, at.step)
        _, end = loop.train(
            program, plans, middle, evaluations=5, on_record=found.append, at=at, before=seen
        )
        assert_same(end, state)
        assert timeless(found) == timeless(records)[5 - len(found) :]


def test_what_was_measured_replays_bitwise(streamed):
    plans, program = plans_of(echo="measured"), streamed
    kept = {}

    def keep(at, state, seen):
        kept[at.step] = at, jax.tree.map(jnp.copy, state), seen

    saving = loop.Saving(due=lambda step: step in (25, STEPS), save=keep)
    trained(program, plans, saving=saving)
    at, middle, seen = kept[25]
    decided = list(at.decided)[:25]
    resumed = loop.resumed(plans, 25, tuple(decided))
    assert resumed.loads == sum(decided)
    found = []
    at, end = loop.train(
        program, plans, middle, evaluations=5, on_record=found.append, at=resumed, before=seen
    )
    assert len(at.decided) == STEPS and list(at.decided[:25]) == decided
    replay = plans._replace(echo=ordering.echo.EchoPlan(list(at.decided), "measured"))
    again, _ = trained(program, replay)
    assert_same(end, again)


def test_a_checkpoint_of_other_plans_is_refused(tmp_path, program):
    run_in(tmp_path, program, plans_of())
    with pytest.raises(ValueError, match="step 60 belongs to another echo plan: give the command"):
        run_in(tmp_path, program, plans_of(echo="fixed"))


def test_what_was_measured_is_a_plan_in_the_end(tmp_path, streamed):
    plans = plans_of(echo="measured")
    plans_of().echo.save(str(tmp_path / "echo_plan.json"))  # left by another policy
    run_in(tmp_path, streamed, plans)
    at, _, _ = result(tmp_path, streamed, plans)
    plan = ordering.echo.read_echo_plan(str(tmp_path / "echo_plan.json"))
    assert plan.fresh.tolist() == list(at.decided)


class Source:
    """Random access to more test than training examples, with another view of every epoch."""

    def __init__(self, data):
        self.data, self.epochs = data, []

    def __len__(self):
        return len(self.data["y"])

    def __getitem__(self, i):
        return {name: values[i] for name, values in self.data.items()}

    def at_epoch(self, epoch):
        self.epochs.append(epoch)
        return self


def test_a_source_trains_as_arrays_do(streamed):
    arrays = task()
    train = Source(arrays.train)
    many = {name: np.concatenate([v, v]) for name, v in arrays.test.items()}
    sources = arrays._replace(train=train, test=Source(many))
    setup = run_setting.setup_of(RECIPE)
    program = whole.build(
        sources, METHODS["cd_grab"], RULES["qsr"].rounds, setup, epochs=15, streamed=True
    )
    plans = plans_of()
    state, _ = trained(streamed, plans)
    other, records = trained(program, plans)
    assert_same(state, other)
    assert set(train.epochs) == set(range(-(-plans.echo.loads // 4)))
    assert records[-1]["test_accuracy"] > 0.8


@pytest.mark.parametrize(
    "fields,message",
    [
        ({"warmup_steps": 60}, r"--warmup_steps is 60 of 60 steps: .* lower the warmup"),
        ({"growth": 0.0}, r"--growth is 0.0: alpha / peak rate of QSR must be positive"),
        ({"total_steps": 0, "warmup_steps": 0}, r"is 0 of 0 steps: .* Raise --total_steps"),
    ],
)
def test_bad_plans_are_named(fields, message):
    decisions = run_setting.Decisions("qsr", "none", 60, "cosine", 0.01, 3, 2, 1.5, None, 3)
    with pytest.raises(ValueError, match=message):
        run_setting.plans_of(decisions._replace(**fields), RECIPE, 4, rate=0.3, seed=0)


def test_help_shows_every_flag_of_the_program():
    values = flags.FlagValues()
    train.define_flags(values)
    shown = {flag.name for flag in values.get_key_flags_for_module(sys.argv[0])}
    assert shown == set(values)
    assert {"order", "workers", "tensorboard", "coordinator_address"} < shown


def test_bad_input_is_named(program):
    plans = plans_of()
    short = plans._replace(rates=plans.rates[:-1])
    with pytest.raises(ValueError, match="60 steps and the run 59"):
        trained(program, short)
    setup = run_setting.setup_of(RECIPE)
    with pytest.raises(ValueError, match="64 workers with units of 1 examples need at least 64"):
        whole.check_setup(task(), setup._replace(workers=64))
    with pytest.raises(ValueError, match="--workers is 0: pass a whole number >= 1"):
        whole.check_setup(task(), setup._replace(workers=0))
    with pytest.raises(FloatingPointError, match=r"unit \d+ of worker \d is not finite in step \d"):
        trained(program, plans._replace(rates=np.full(STEPS, 1e38)))
