"""Optimizers of optax under local steps, and a plain loop over workers that they must equal."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import local_opt
from syncopate import mesh
from tests.problems import RUNS, W, copies

STEPS = 6
PLAN = local_opt.SyncPlan([0, 2, 3], STEPS)  # rounds of 2, 1, 3 steps
RNG = np.random.default_rng(5)
PARAMS = {
    "b": jnp.asarray(RNG.normal(size=4), jnp.float32),
    "w": jnp.asarray(RNG.normal(size=(3, 4)), jnp.float32),
}
TARGETS = {
    "b": jnp.asarray(RNG.normal(size=(W, STEPS, 4)), jnp.float32),
    "w": jnp.asarray(RNG.normal(size=(W, STEPS, 3, 4)), jnp.float32),
}
SGD = optax.sgd(0.1, momentum=0.9)
ONLY_W = {"b": False, "w": True}


def square(params, target):
    return 0.5 * optax.tree.norm(optax.tree.sub(params, target), squared=True)


def one_step(opt, params, state, target, extra=(), at=None):
    """A step of one worker, with what the optimizer needs beside a gradient, taken `at` a point."""
    at = params if at is None else at
    value, grads = jax.value_and_grad(square)(at, target)
    given = {
        "value": value,
        "grad": grads,
        "value_fn": lambda params: square(params, target),
        "grad_fn": lambda params, i: jax.grad(square)(params, target),
    }
    updates, state = opt.update(grads, state, params, **{name: given[name] for name in extra})
    return optax.apply_updates(params, updates), state


def named(path):
    return jax.tree_util.keystr(path, simple=True, separator=".").split(".")


def mean(trees, of):
    """NumPy's mean of some leaves of W trees; the others stay each one's own."""
    paths, structure = jax.tree_util.tree_flatten_with_path(trees[0])
    rows = list(zip(*map(jax.tree.leaves, trees), strict=True))
    for i, (path, _) in enumerate(paths):
        if of(named(path)):
            rows[i] = [np.mean(np.stack(rows[i]), axis=0, dtype=np.float64).astype("f")] * W
    return [structure.unflatten([row[w] for row in rows]) for w in range(W)]


def expected(make, met=(), extra=(), plans=None):
    """([W, STEPS, ...], kept): W states of optax in a loop, and means where a round ends.

    Args:
      make: of the optimizer; met: fields of its state that meet, too; extra: arguments that it
        needs; plans: of some of the parameters alone, by name.

    `kept` is what a step leaves of a move of worker 0's parameters, at least: 1 if it only adds.
    """
    plans = {"b": PLAN, "w": PLAN} if plans is None else plans
    opts = [make() for _ in range(W)]  # each with a key of its own, if any
    step = jax.jit(lambda p, s, target, at: one_step(opts[0], p, s, target, extra, at))
    params, states = [PARAMS] * W, [opt.init(PARAMS) for opt in opts]
    history, kept = [], np.inf
    for t in range(STEPS):
        targets = [jax.tree.map(lambda x, w=w, t=t: x[w, t], TARGETS) for w in range(W)]
        moved = jax.tree.map(lambda x: x + 0.01, params[0])
        moved = step(moved, jax.tree.map(jnp.copy, states[0]), targets[0], params[0])[0]
        for w in range(W):
            params[w], states[w] = step(params[w], states[w], targets[w], params[w])
        shares = [(moved[n] - params[0][n]).mean() / 0.01 for n in PARAMS]
        kept = min(kept, *map(float, shares))
        due = [name for name, plan in plans.items() if plan.syncs_after(t)]
        params = mean(params, lambda path, due=due: path[0] in due)
        if due and met:
            states = mean(states, lambda path: set(path) & set(met))
        history.append(jax.tree.map(lambda *x: np.stack(x), *params))
    return jax.tree.map(lambda *x: np.stack(x, axis=1), *history), kept


def found(opt, run="vmap", extra=()):
    """The same of what is to be tested, in one compiled loop: history, and the last state."""

    @jax.jit
    @RUNS[run]
    def all_steps(params, targets):
        def body(carry, target):
            carry = mesh.varying(one_step(opt, *carry, target, extra), params)
            return carry, carry[0]

        start = mesh.varying((params, opt.init(params)), params)
        (_, state), history = jax.lax.scan(body, start, targets)
        return history, state

    return all_steps(copies(PARAMS), TARGETS)


def assert_equal(history, reference):
    # float32 sums in another order, over six steps of numbers of about 1.
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5), history, reference
    )


def last(history):
    return jax.tree.map(lambda x: x[:, -1], history)


def local(inner, plan=PLAN, **options):
    return local_opt.local_steps(inner, plan, axis_name="worker", **options)
