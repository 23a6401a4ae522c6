"""Every optimizer of optax and optax.contrib in local steps: what no worker moves stays to the bit.

The list is made from the packages: all that take a learning rate, and those of MORE. Left out are
the parts that optimizers are chained of (clip, scale_by_adam, ..), which have no rate.
"""

import functools
import inspect
import itertools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax import contrib

import local_opt
from tests.cases import mostly_slow

START = np.random.default_rng(3).normal(size=(4, 3)).astype(np.float32)
LABELS = {"frozen": "f", "train": "t"}
SGD = optax.sgd(0.05)
QUICK = ("adam", "schedule_free_sgd")
MORE = {  # arguments beside a learning rate, or without one
    "MultiSteps": {"opt": SGD, "every_k_schedule": 2},
    "apply_if_finite": {"inner": SGD, "max_consecutive_errors": 2},
    "cocob": {},
    "dadapt_adamw": {},
    "dog": {},
    "dowg": {},
    "dpsgd": {"l2_norm_clip": 1.0, "noise_multiplier": 0.1, "seed": 0},
    "lbfgs": {},
    "lookahead": {"fast_optimizer": SGD, "sync_period": 2, "slow_step_size": 0.5},
    "mechanize": {"base_optimizer": SGD},
    "momo": {},
    "momo_adam": {},
    "noisy_sgd": {"key": jax.random.key(0)},
    "polyak_sgd": {},
    "prodigy": {},
    "sam": {"optimizer": SGD, "adv_optimizer": optax.chain(contrib.normalize(), SGD)},
    "schedule_free": {"base_optimizer": SGD},
    "schedule_free_adamw": {},
    "schedule_free_sgd": {},
}
# The extra arguments of a step; others get those of the first row.
GIVEN = {"": ("value", "grad", "value_fn"), "sam": (), "sophia": ("obj_fn",)}
POLICIES, WORKERS = ("local", "mean", "reset"), (2, 3, 5, 7, 8)
UNDONE = "every sync would be undone", ("local",)
REFUSED = {  # {optimizer: (what the message says, for which policies)}
    "dpsgd": ("takes the gradients of all examples", POLICIES),
    "lookahead": ("takes pairs of fast and slow parameters", POLICIES),
    "lbfgs": ("whose means are inconsistent", ("mean",)),
    **dict.fromkeys(["cocob", "madgrad", "sam"], UNDONE),
    **dict.fromkeys(["schedule_free", "schedule_free_adamw", "schedule_free_sgd"], UNDONE),
}
PLAN = local_opt.constant(2, total_steps=88)  # long enough for the momentum of `diloco`
HOW = {
    "plain": {},
    "outer sgd": {"outer": optax.sgd(0.9)},
    "outer nesterov": {"outer": optax.sgd(0.7, momentum=0.9, nesterov=True)},
    "outer adam": {"outer": optax.adam(1e-2)},
    "outer lion": {"outer": optax.lion(1e-2, weight_decay=0.0)},
    "outer muon": {"outer": contrib.muon(1e-2)},
    "diloco": {"preset": local_opt.presets.diloco},
    "slowmo": {"preset": local_opt.presets.slowmo},
    "scaffold": {"correction": local_opt.corrections.scaffold()},
    "fedprox": {"correction": local_opt.corrections.fedprox(0.5)},
    "streaming": {"outer": optax.adam(1e-2)},
}
COMPRESS = {
    "none": None,
    **{name: local_opt.quantize(name) for name in ("bfloat16", "int8", "int4")},
    "top_k": local_opt.top_k(1 / 16, block=128),
}


def optimizers():
    """({name: optimizer}, the names of the parts)."""
    results, parts = {}, set()
    for package in (optax, contrib):
        for name, make in vars(package).items():
            if name.startswith("_") or not (inspect.isfunction(make) or name in MORE):
                continue
            of = inspect.signature(make)
            rate = {"learning_rate": 0.05} if "learning_rate" in of.parameters else {}
            if name in MORE or (rate and not name.startswith("scale_by")):
                with warnings.catch_warnings(action="ignore"):  # deprecated ones still serve
                    results[name] = make(**rate, **MORE.get(name, {}))
            elif "GradientTransformation" in str(of.return_annotation):
                parts.add(name)
    return results, parts


OPTIMIZERS, PARTS = optimizers()
NAMES = sorted(OPTIMIZERS)
ROWS = mostly_slow(NAMES, quick=QUICK)
PAIRS = mostly_slow(itertools.product(WORKERS, (False, True)), quick=[(7, True)])


def training(name, how, compress, policy):
    """One worker's (params, target, weight) -> params after three rounds of two steps."""
    inner = optax.partition({"t": OPTIMIZERS[name], "f": optax.set_to_zero()}, LABELS)
    options = {"compress": compress, "sync_opt_state": policy, **HOW[how]}
    if how == "streaming":
        options.pop("sync_opt_state")
        of = local_opt.streaming.streaming_rounds(inner, fragments=2, **options)
    else:
        make = functools.partial(options.pop("preset", local_opt.local_rounds), inner)
        of = make(plan=PLAN, **options) if "preset" in HOW[how] else make(**options)

    def sync(params, state, weight):
        if how != "streaming":
            return of.sync(params, state, weight=weight)
        for fragment in range(2):
            state = of.start(params, state, fragment=fragment, weight=weight)
            params, state = of.finish(params, state, fragment=fragment, weight=weight)
        return params, state

    def run(params, target, weight):
        loss = lambda params: jnp.sum((params["train"] - target) ** 2) / 2  # noqa: E731

        def step(params, state, **extra):
            value, grads = jax.value_and_grad(loss)(params)
            masked = {**grads, "frozen": optax.MaskedNode()}  # as an optimizer of a part sees it
            given = {"value": value, "grad": masked, "value_fn": loss, "obj_fn": loss}
            extra |= {key: given[key] for key in GIVEN.get(name, GIVEN[""])}
            updates, state = of.update(grads, state, params, **extra)
            return optax.apply_updates(params, updates), state

        def turn(_, carry):
            if "preset" in HOW[how]:
                return step(*step(*carry, sync=False), sync=True, weight=weight)
            return sync(*step(*step(*carry)), weight)

        return jax.lax.fori_loop(0, 3, turn, (params, of.init(params)))[0]

    return run


def check(rows):
    """Runs (name, how, compress, policy, workers, weighs) in one program: (right, refused)."""
    params, runs, refused = {"frozen": START, "train": START}, {}, 0
    for row in rows:
        name, how, compress, policy, workers, weighs = row
        run = functools.partial(training, name, how, COMPRESS[compress], policy)
        weight = jnp.arange(1.0, workers + 1) if weighs else None
        args = params, jnp.arange(float(workers)), weight
        over = functools.partial(jax.vmap, in_axes=(None, 0, 0 if weighs else None))
        why, policies = REFUSED.get(name, ("", ()))
        if "correction" in HOW[how] and compress != "none":
            why, policies = "leave out correction= or compress=", POLICIES
        if ("local" if how == "streaming" else policy) in policies:
            with pytest.raises(ValueError, match=why):
                jax.eval_shape(over(run(), axis_name="worker"), *args)
            refused += 1
        else:
            runs[row] = over(run(), axis_name="worker"), args
    result = jax.jit(lambda: {row: run(*args) for row, (run, args) in runs.items()})()
    for row, after in result.items():
        frozen, train, start = after["frozen"], after["train"], np.stack([START] * row[4])
        rounding = 3 * 2**-23 if row[1:3] == ("plain", "none") else 0  # one a sync
        np.testing.assert_allclose(frozen, start, rtol=rounding, err_msg=str(row))
        assert np.isfinite(train).all() and (train != start).any(), row
        if "preset" in HOW[row[1]]:
            local_opt.check_synced(train)
        elif row[1] != "streaming":  # which mixes
            np.testing.assert_array_equal(train, np.stack([train[0]] * row[4]), err_msg=str(row))
    return len(result), refused


@pytest.mark.parametrize("name", ROWS)
def test_an_optimizer_leaves_what_it_does_not_move_in_every_way_to_synchronise(name):
    i, rows = NAMES.index(name), []
    for j, how in enumerate(HOW):
        compress = "none" if "correction" in HOW[how] else [*COMPRESS][(i + j) % 5]
        more = POLICIES[(i // 5 + j) % 3], WORKERS[(i + 2 * j) % 5], (i // 2 + j) % 2 == 0
        rows.append((name, how, compress, *more))
    right, refused = check(rows)
    print(f"{name}: {len(rows)} tried, {right} right, {refused} refused, 0 wrong")


@pytest.mark.slow
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("name", ["adam", "schedule_free_sgd"])
def test_every_way_to_synchronise_leaves_it_with_every_compressor_and_policy(name, how):
    pairs = [(c, p) for c in COMPRESS for p in POLICIES]
    rows = [(name, how, *pair, WORKERS[i % 5], i % 2 == 0) for i, pair in enumerate(pairs)]
    right, refused = check(rows)
    print(f"{name}, {how}: {len(rows)} tried, {right} right, {refused} refused, 0 wrong")


def test_the_table_names_optimizers_that_there_are():
    assert {*MORE} <= {*OPTIMIZERS} and {*REFUSED} <= {*OPTIMIZERS} and not PARTS & {*OPTIMIZERS}
    print(f"{len(OPTIMIZERS)} optimizers; {len(PARTS)} parts left out: {', '.join(sorted(PARTS))}")


@pytest.mark.parametrize("workers,weighs", PAIRS)
def test_a_step_and_a_sync_of_sgd_are_data_parallel_training(workers, weighs):
    """In every way whose sync leaves SGD's mean step, or makes the outer optimizer's of it."""
    momentum = {"momentum": 0.9, "nesterov": True}
    pairs = {
        "plain": ({}, SGD),
        "outer sgd": ({"outer": optax.sgd(1.0)}, SGD),
        "outer nesterov": ({"outer": optax.sgd(1.0, **momentum)}, optax.sgd(0.05, **momentum)),
        "scaffold": (HOW["scaffold"], SGD),
        "fedprox": (HOW["fedprox"], SGD),
    }
    weight = jnp.arange(1.0, workers + 1) if weighs else None

    def run(target, weight):
        results = {}
        for name, (how, same) in pairs.items():
            local, parallel = local_opt.local_rounds(SGD, **how), local_opt.parallel_rounds(same)
            x = y = jnp.asarray(START)
            state, other = local.init(x), parallel.init(y)
            for _ in range(4):
                updates, state = local.update(x - target, state, x)
                x, state = local.sync(x + updates, state, weight=weight)
                updates, other = parallel.update(y - target, other, y, weight=weight)
                y += updates
            results[name] = x, y
        return results

    over = jax.vmap(run, in_axes=(0, 0 if weighs else None), axis_name="worker")
    for name, (x, y) in jax.jit(over)(jnp.arange(float(workers)), weight).items():
        np.testing.assert_allclose(x, y, rtol=1e-6, atol=1e-6, err_msg=name)
