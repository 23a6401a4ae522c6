"""Objects of flax.nnx that a mapped step updates in place, as `nnx.jit` updates them."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import local_opt
from tests.cases import mostly_slow
from tests.compiled_runs import compilations

W = 2
TWO = jax.make_mesh((W, 2), ("worker", "data"), devices=jax.devices()[: 2 * W])
MESH = jax.make_mesh((W,), ("worker",), devices=jax.devices()[:W])
everywhere = pytest.mark.parametrize(
    "workers", mostly_slow([W, MESH, TWO], quick=[W, TWO]), ids=["vmap", "mesh", "two axes"]
)
PLAN = local_opt.constant(2, total_steps=9)
X = np.linspace(-1, 1, 24, dtype=np.float32).reshape(8, 3)


class Net(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(3, 4, rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.dropout = nnx.Dropout(0.3, rngs=rngs)

    def __call__(self, x):
        return self.dropout(self.norm(self.linear(x)))


def loss_fn(model, x):
    return jnp.mean((model(x) - 1) ** 2)


def made(workers=None):
    """A model, its optimizer and its metrics."""
    model = Net(nnx.Rngs(0))
    tx = local_opt.local_steps(optax.sgd(0.1, momentum=0.9), PLAN)
    objects = model, nnx.Optimizer(model, tx, wrt=nnx.Param), nnx.metrics.Average("loss")
    return objects if workers is None else local_opt.replicate(objects, workers, keys="fold")


def step(model, optimizer, metrics, x):
    loss, grads = nnx.value_and_grad(loss_fn)(model, x)
    optimizer.update(model, grads)
    metrics.update(loss=loss)


def numbers(tree):
    values = [x for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.inexact)]
    return np.concatenate([np.ravel(x) for x in values])


def mapped(function, workers, *specs, out_specs=None, **options):
    return local_opt.map_workers(function, workers, in_specs=specs, out_specs=out_specs, **options)


@everywhere
def test_a_step_that_returns_nothing_updates_what_it_was_given(workers):
    def returning(objects, x):  # as a step of jax.jit has to
        step(*objects, x)
        return objects

    expected = made(workers)
    run = jax.jit(mapped(returning, workers, "worker", "batch", out_specs="worker"))
    objects, each = made(workers), mapped(step, workers, "worker", "worker", "worker", "batch")
    update = each if workers is TWO else nnx.jit(each)  # there a call compiles itself
    for _ in range(3):
        expected = run(expected, X)
        assert update(*objects, X) is None
    np.testing.assert_allclose(numbers(objects), numbers(expected), atol=1e-6)
    assert objects[1].step.tolist() == [3] * W and numbers(objects[2]).all()
    counts = objects[0].dropout.rngs.count.get_value()
    assert counts.tolist() == [3] * W, "keys go on"


@everywhere
def test_what_arguments_share_stays_shared(workers):
    model = Net(nnx.Rngs(0))
    both = model, nnx.ModelAndOptimizer(model, local_opt.local_steps(optax.sgd(0.1), PLAN))
    model, optimizer = local_opt.replicate(both, workers, keys="fold")
    assert optimizer.model is model

    def train(model, optimizer, x):
        loss, grads = nnx.value_and_grad(loss_fn)(model, x)
        optimizer.update(grads)  # of the model inside
        return model, loss

    before = numbers(model)
    run = nnx.jit(mapped(train, workers, "worker", "worker", "batch", out_specs=("worker", "mean")))
    same, loss = run(model, optimizer, X)
    assert same is model is optimizer.model and not loss.shape
    assert (numbers(model) != before).any()
    mean, holder = local_opt.mean_over_workers((model, optimizer))
    assert holder.model is mean and mean.linear.kernel.shape == (3, 4)


@everywhere
def test_a_replicated_object_may_only_change_alike(workers):
    class Steps(nnx.Module):
        def __init__(self):
            self.count = nnx.Variable(jnp.zeros(()))

    def scores(model, steps, x):
        steps.count[...] += 1
        return model(x)

    steps, model = Steps(), Net(nnx.Rngs(0))
    model.eval()
    run = mapped(scores, workers, "replicated", "replicated", "batch", out_specs="batch")
    scored = run(model, steps, X)
    np.testing.assert_allclose(scored, model(X), atol=1e-6)
    assert steps.count.get_value() == 1
    model.train()
    message = "args.0..norm.mean is 'replicated' in in_specs, is changed .* differs between workers"
    with pytest.raises(ValueError, match=message):
        mapped(loss_fn, workers, "replicated", "batch", out_specs="mean")(model, X)


def test_an_unchanged_replicated_object_needs_no_proof():
    def scores(model, x):  # which has a callback, that nothing is proved of
        return jax.pure_callback(np.sin, jax.typeof(y := model.linear(x)), y)

    model = Net(nnx.Rngs(0))
    result = jax.jit(mapped(scores, MESH, "replicated", "batch", out_specs="batch"))(model, X)
    np.testing.assert_allclose(result, np.sin(model.linear(X)), atol=1e-6)


def test_equal_calls_compile_once():
    """On a mesh of several axes a call compiles itself."""
    objects, run = made(TWO), mapped(step, TWO, "worker", "worker", "worker", "batch")
    run(*objects, X)
    with compilations() as compiled:
        run(*objects, X)
    assert compiled == []


def grow(model, x):
    model.bias = nnx.Param(jnp.zeros(3))


REFUSED = {
    "a new part": (
        lambda model: mapped(grow, W, "worker", "batch")(model, X),
        "adds, removes or replaces pa",
    ),
    "a mode": (
        lambda model: mapped(lambda m, x: m.eval(), W, "worker", "batch")(model, X),
        "sets a value that is not an array",
    ),
    "rows": (
        lambda model: mapped(grow, W, "batch", "batch")(model, X),
        r"is a Net of flax.nnx with the words \['batch'\]: give the whole object one word",
    ),
    "two words": (
        lambda model: mapped(lambda a, b: None, W, "worker", "replicated")(
            {"a": model}, {"b": nnx.ModelAndOptimizer(model, optax.sgd(0.1))}
        ),
        r"args\[0\]\['a'\] is 'worker' in in_specs and args\[1\]\['b'\], which shares a .*: give",
    ),
    "one after another": (
        lambda model: mapped(loss_fn, W, "replicated", "batch", out_specs="mean", in_turn=True)(
            Net(nnx.Rngs(0)), X
        ),
        r"dropout.rngs.count is 'replicated' in in_specs and the function changes it, but in_turn",
    ),
    "other workers": (
        lambda model: mapped(loss_fn, 4, "worker", "batch", out_specs="mean")(model, X),
        r"args\[0\].dropout.rngs.count is 'worker' in in_specs and has the shape \(2,\), and there",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_done_is_refused(case):
    run, message = REFUSED[case]
    model = local_opt.replicate(Net(nnx.Rngs(0)), W, keys="fold")
    before = numbers(model)
    with pytest.raises(ValueError, match=message):
        run(model)
    np.testing.assert_array_equal(numbers(model), before)


def test_flax_is_no_requirement(monkeypatch):
    monkeypatch.setitem(sys.modules, "flax.nnx", None)
    run = mapped(lambda x: 2 * x, W, "worker", out_specs="worker")
    assert run(local_opt.replicate(jnp.ones(3), W)).tolist() == [[2.0] * 3] * W
