"""Random keys inside a tree: copied to every worker with a warning, or one of each worker's own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType

import local_opt
from tests.refused import refuses

W = 4
MESHES = [
    jax.make_mesh((W,), ("worker",), (kind,), devices=jax.devices()[:W])
    for kind in (AxisType.Auto, AxisType.Explicit)
]
everywhere = pytest.mark.parametrize("workers", [W, *MESHES], ids=["vmap", "Auto", "Explicit"])


class Net(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(3, 8, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.dropout(self.linear(x))


def dropped(workers, **options):
    """Which numbers each worker drops, in two steps of a model of flax.nnx."""
    graph, state = nnx.split(Net(nnx.Rngs(0)))

    def step(state, x):
        model = nnx.merge(graph, state)
        return nnx.state(model), model(x) == 0

    run = jax.jit(local_opt.lift(step, workers, inputs="owned shared", outputs="owned owned"))
    state, found = local_opt.owned(state, workers, **options), []
    for _ in range(2):
        state, zeros = run(state, jnp.ones((5, 3)))
        found.append(np.asarray(zeros))
    return np.stack(found, 1)  # [W, steps, rows, features]


@everywhere
def test_workers_of_nnx_have_their_own_dropout_with_folded_keys(workers):
    own = dropped(workers, keys="fold")
    masks = {mask.tobytes() for worker in own for mask in worker}
    assert len(masks) == 2 * W, "every worker's, and every step's"
    with pytest.warns(UserWarning, match="the same key .*rngs.*key"):
        same = dropped(workers)
    assert (same == same[:1]).all() and (same[0, 0] != same[0, 1]).any()
    np.testing.assert_array_equal(dropped(workers, keys="copy"), same)


@everywhere
def test_the_key_of_a_worker_is_folded_with_its_number(workers):
    keys = {"one": jax.random.key(3), "two": jax.random.split(jax.random.key(4))}
    own = jax.tree.map(jax.random.key_data, local_opt.owned(keys, workers, keys="fold"))
    for w in range(W):
        alone = jax.random.fold_in(keys["one"], w)
        both = jax.vmap(jax.random.fold_in, (0, None))(keys["two"], w)
        np.testing.assert_array_equal(np.asarray(own["one"])[w], jax.random.key_data(alone))
        np.testing.assert_array_equal(np.asarray(own["two"])[w], jax.random.key_data(both))


def test_a_warning_names_the_key_and_what_to_pass():
    state = {"params": jnp.zeros(2), "dropout": jax.random.key(0)}
    with pytest.warns(UserWarning, match=r"same key \['dropout'\].* keys='fold'.* keys='copy'"):
        own = local_opt.owned(state, W)
    assert (own["dropout"] == state["dropout"]).all()
    local_opt.owned({"params": jnp.zeros(2)}, W)  # no key, no warning


test_unknown_keys_are_refused = refuses({
    "word": (
        lambda: local_opt.owned(jax.random.key(0), W, keys="split"),
        "keys is 'split': pass 'fold', .* or 'copy'",
    ),
})  # fmt: skip
