"""Programs that forbid transfers, as by jax_transfer_guard, may call every public function."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import local_opt
from experiments.distributed.devices import worker_mesh
from tests.bad_calls_local_opt import CALLS
from tests.public import packages

SGD, PLAN, RATES = optax.sgd(0.1, momentum=0.9), local_opt.constant(1, total_steps=99), jnp.ones(9)
FALL, KEY = optax.cosine_decay_schedule(0.1, 9), jax.random.PRNGKey(0)
TYPED = jax.random.key(0)
X, STEPS = {"w": jnp.ones((2, 3))}, jnp.arange(9)
FRESH = STEPS % 3 == 0
VOLUMES_AND_SECONDS = jnp.array([1.0, 0.5]), jnp.array([3.0, 2.0])
TREE = X | {"n": jnp.array([5, 5]), "np": np.ones((2, 2), np.float32), "rng": jnp.stack([KEY, KEY])}
BY_POWER = dict(total_steps=9, alpha=0.2, h_base=1)
MESH, INT8 = worker_mesh(2), local_opt.quantize("int8")
PUBLIC = {name: getattr(m, name) for m in packages(local_opt) for name in m.__all__}
CALLED = {name for name in PUBLIC if inspect.isfunction(PUBLIC[name])} - {"count_collectives"}
HOST = {name: functools.partial(CALLS[name].run, **CALLS[name].valid) for name in CALLED}
HOST |= {  # with arrays on a device, and what is called beside a step
    "accumulated_rounds": lambda: local_opt.accumulated_rounds(SGD).init(X),
    "bernoulli": lambda: local_opt.bernoulli(FALL, total_steps=8, key=KEY),
    "check_same": PLAN.check_same,
    "check_synced": lambda: local_opt.check_synced(TREE, before=TREE),
    "communication_time": lambda: local_opt.costs.communication_time(*VOLUMES_AND_SECONDS),
    "constant": lambda: local_opt.constant(2, total_steps=9).syncs_after(STEPS),
    "diloco": lambda: local_opt.presets.diloco(SGD, PLAN).init(X),
    "fedprox": lambda: local_opt.local_rounds(
        SGD, correction=local_opt.corrections.fedprox(0.1)
    ).init(X),
    "local_rounds": lambda: local_opt.local_rounds(SGD, compress=INT8).init(X),
    "local_steps": lambda: local_opt.local_steps(SGD, PLAN, outer=SGD).init(X),
    "map_workers": lambda: local_opt.map_workers(
        local_opt.local_steps(SGD, PLAN).init, 2, in_specs="worker", out_specs="worker"
    )(X),
    "mean_over_workers": lambda: local_opt.mean_over_workers(TREE),
    "normalize_by_period": lambda: local_opt.local_rounds(
        SGD, outer=local_opt.presets.normalize_by_period(SGD, h_base=2)
    ).init(X),
    "parallel_rounds": lambda: local_opt.parallel_rounds(SGD).init(X),
    "qsr": lambda: local_opt.qsr(FALL, **BY_POWER),
    "qsr, step by step": lambda: local_opt.qsr(lambda t: float(FALL(t)), **BY_POWER),
    "replicate": lambda: local_opt.replicate({"step": 0, "np": np.ones(3)} | X, MESH),
    "replicate, keys": lambda: local_opt.replicate({"step": 0, "key": TYPED}, 2, keys="fold"),
    "scaffold": lambda: local_opt.local_rounds(
        SGD, correction=local_opt.corrections.scaffold(), drift=True
    ).init(X),
    "slowmo": lambda: local_opt.presets.slowmo(SGD, PLAN, inner_rate=FALL).init(X),
    "streaming_rounds": lambda: local_opt.streaming.streaming_rounds(SGD, fragments=1).init(X),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", sorted(HOST))
def test_host_work_passes_a_transfer_guard(name):
    with jax.transfer_guard("disallow"):
        HOST[name]()
