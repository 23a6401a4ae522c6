"""Whether a task's units are of the kind that control variates help: measured at its optimum."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


class Sign(NamedTuple):
    """How the two parts of the bias of local steps lie to each other.

    Fields:
      cosine: of E[H_i z_i], which a worker feels of its own units' curvature, with E[f'''(z_i,
        z_i)] / 2, in the metric of H^-1, in which a bias costs loss. Below 0 the two cancel, and a
        correction that takes one away lets the other be.
      noise: trace of the covariance of z over the trace of H; 1 in the family.
    """

    cosine: float
    noise: float


def sign(model, train: dict, *, steps: int = 12, sample: int = 200, seed: int = 0) -> Sign:
    """Measures a model that is convex and small: dense Hessians.

    Args:
      model: a `models.Model`; train: its examples, arrays.
      steps: of Newton's method from the initial parameters; sample: units of the third derivative.
    """
    params, unravel = jax.flatten_util.ravel_pytree(model.init(jax.random.key(seed)))
    count = len(jax.tree.leaves(train)[0])
    train = jax.tree.map(jnp.asarray, train)

    def unit(x, i):
        return model.loss(unravel(x), jax.tree.map(lambda a: a[i][None], train), None)[0]

    def mean(x):
        return jnp.mean(model.loss(unravel(x), train, None))

    gradient, hessian = jax.jit(jax.grad(mean)), jax.jit(jax.hessian(mean))
    for _ in range(steps):
        params = params - jnp.linalg.solve(hessian(params), gradient(params))
    units = jnp.arange(count)
    z = -jax.jit(jax.vmap(jax.grad(unit), (None, 0)))(params, units)
    z = z - jnp.mean(z, axis=0, keepdims=True)

    def own(i, v):
        return jax.jvp(lambda x: jax.grad(unit)(x, i), (params,), (v,))[1]

    def third(v):
        along = lambda x: jax.jvp(jax.grad(mean), (x,), (v,))[1]  # noqa: E731
        return jax.jvp(along, (params,), (v,))[1]

    # z has the mean 0, so the mean curvature adds nothing.
    spread = jax.jit(lambda: jnp.mean(jax.vmap(own)(units, z), axis=0))()
    few = z[np.random.default_rng(seed).choice(count, min(sample, count), replace=False)]
    cubic = jnp.mean(jax.jit(lambda v: jax.lax.map(third, v))(few), axis=0) / 2
    curvature = hessian(params)
    solved = jnp.linalg.solve(curvature, jnp.stack([spread, cubic], axis=1))
    products = jnp.stack([spread, cubic]) @ solved
    cosine = products[0, 1] / jnp.sqrt(products[0, 0] * products[1, 1])
    noise = jnp.sum(jnp.mean(jnp.square(z), axis=0)) / jnp.trace(curvature)
    return Sign(float(cosine), float(noise))
