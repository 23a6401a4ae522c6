"""A fragment's mean travels between two TPU slices while steps are computed."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import local_opt
from benchmarks.topologies import LIBTPU, stay_on_cpu, uncached
from syncopate.unstable import topologies
from tests.compiled_runs import compiled_by

LAYERS, WIDTH, EXAMPLES, DELAY = 4, 512, 128, 2


def loss(params, x):
    for layer in range(LAYERS):
        x = jnp.tanh(x @ params[f"w{layer}"])
    return jnp.mean(jnp.square(x))


def scheduled(delay):
    """(kind, whether it is of a matrix product) of a program's instructions, as they are run."""
    stay_on_cpu()
    result = topologies.get_topology_desc(
        platform="tpu", topology_name="v5e:2x2", num_slices=2
    ).devices
    mesh = Mesh(np.array(result), ("worker",))
    stream = local_opt.streaming.streaming_rounds(optax.sgd(0.1), axis_name="worker", fragments=2)

    def program(params, state, x):
        params, state, x = jax.tree.map(lambda leaf: leaf[0], (params, state, x))
        state = stream.start(params, state, fragment=0)
        for _ in range(delay):
            updates, state = stream.update(jax.grad(loss)(params, x), state, params)
            params = optax.apply_updates(params, updates)
        outcome = stream.finish(params, state, fragment=0)
        return jax.tree.map(lambda leaf: leaf[None], outcome)

    def of_workers(tree):
        place = NamedSharding(mesh, P("worker"))
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct((mesh.size, *x.shape), x.dtype, sharding=place), tree
        )

    params = {f"w{i}": jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32) for i in range(LAYERS)}
    state, x = (
        jax.eval_shape(stream.init, params),
        jax.ShapeDtypeStruct((EXAMPLES, WIDTH), jnp.float32),
    )
    mapped = jax.shard_map(
        program, mesh=mesh, in_specs=P("worker"), out_specs=P("worker"), check_vma=False
    )
    with uncached():
        text = jax.jit(mapped).lower(*of_workers((params, state, x))).compile().as_text()
    lines = text[text.index("\nENTRY") :].splitlines()
    kinds = [re.match(r"\s+(?:ROOT )?%?[\w.\-]+ = .*? ([\w\-]+)\(", line) for line in lines]
    return [(k[1], "dot_general" in line) for k, line in zip(kinds, lines, strict=True) if k]


@compiled_by(LIBTPU)
def test_steps_are_computed_between_the_send_of_a_fragment_and_its_arrival():
    order = scheduled(DELAY)
    kinds = [kind for kind, _ in order]
    sent = max(n for n, kind in enumerate(kinds) if kind == "send")
    products = sum(product for _, product in order[sent : kinds.index("recv-done")])
    # Two steps have three products a layer each, but that of the input's gradient.
    assert products >= DELAY * (2 * LAYERS - 1)
    assert not any(product for _, product in scheduled(0)), "without a step there is nothing"
