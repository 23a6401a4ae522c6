"""Local steps that outlive a process: those that live agree who lives before a sync, and average.

Between two syncs no process waits for another: a death is noticed at the next one.
"""

import concurrent.futures
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import PyTree

from local_opt.mapping import map_workers
from syncopate.mesh import is_key
from syncopate.plans import check_function, check_number
from syncopate.unstable import coordination_client, multihost_utils
from syncopate.workers import AXIS

PLACES = "local_opt/survivors"  # keys of each process in the coordinator's store
RECOVERS = "jax_enable_recoverability"
BACK = -1  # the place of a process that has come back


class Meeting(NamedTuple):
    """Who takes part in a sync: equal on all of them.

    Attributes:
      step: of those that go on, which one that has come back takes over.
      living: the processes' numbers; new: those of them that have come back, which weigh 0.
      mesh: their devices, one worker each, in the sequence of `jax.devices()`.
    """

    step: int
    living: tuple[int, ...]
    new: tuple[int, ...]
    mesh: Mesh


class Survivors:
    """The sync of the processes that live, in a loop whose steps stay within each process.

    x_w <- sync over the workers w of the living: a mean is divided by their number, or by the sum
    of their weights. An outer optimizer and a compressor's residual stay in the state of each.

    A process is dead after `heartbeat_timeout_seconds` of `jax.distributed.initialize`; process 0
    holds the coordination service and must live. The units of the dead are not visited any more. A
    process that comes back under its number, where the backend can take it (not gloo), first syncs
    at once: it gets the trees of the first worker that has gone on, orders included, counts with
    weight 0 and takes the mean; its random keys become its own. If a process dies inside a
    collective, the sync raises an error on the others and the run must go on from its checkpoint.

    Args:
      sync: of one worker, `(*trees) -> trees`, a tuple like those given, as `Rounds.sync`; with
        `weight=`, if workers have weights or come back.
      patience: seconds, > 0: how long to wait for a process that lives and does not come.

    Attributes:
      met: the last `Meeting`, None before the first.
      compiled: {the living, the new, whether without weights: compiled sync}.
      came_back: whether this process has taken part in the run before, and died.

    Raises:
      ValueError: if processes run without `jax_enable_recoverability`, which would end with any.

    Examples:
      >>> import jax, jax.numpy as jnp, optax
      >>> from syncopate import local_opt
      >>> rounds = local_opt.local_rounds(optax.sgd(0.1))
      >>> survivors = local_opt.Survivors(rounds.sync)  # of one process with some devices
      >>> x = local_opt.replicate((jnp.ones(3), rounds.init(jnp.ones(3))), jax.local_device_count())
      >>> params, state = survivors(20, *x)
      >>> survivors.met.living, len(survivors.compiled)
      ((0,), 1)
    """

    def __init__(self, sync: Callable, *, patience: float = 600.0):
        check_function("sync", sync, "params", "state")
        check_number("patience", patience, "(0, inf)")
        if jax.process_count() > 1 and not getattr(jax.config, RECOVERS):
            raise ValueError(
                f"{RECOVERS} is off, and all processes would end with the first: call "
                f"jax.config.update({RECOVERS!r}, True) before jax.distributed.initialize."
            )
        self._sync, self._patience, self._known = sync, patience, None
        self.met: Meeting | None = None
        self.compiled = {}
        self.came_back = jax.process_index() in _places()

    def meet(self, step: int) -> Meeting:
        """Waits for all that live at this step, and says who they are.

        Raises:
          TimeoutError: with those that live and have not come; ValueError: if steps differ.
        """
        place = BACK if self.came_back and self._known is None else step
        found, places = {}, {}
        if (client := coordination_client()) is None:
            found, places = {0: 0}, {0: step}
        else:
            own = f"{PLACES}/{jax.process_index()}"
            client.key_value_set(own, str(place), allow_overwrite=True)
            everyone = list(range(jax.process_count()))
            # Until two answers agree: one may die while it waits in the first.
            while (again := self._waited(lambda: client.get_live_nodes(everyone), step)) != found:
                found, places = again, {} if again == self._known else _places()
        if self.met is not None and found == self._known:
            self.met = self.met._replace(step=step, new=())
            return self.met
        places = {n: at for n, at in places.items() if n in found}
        new = tuple(sorted(n for n, at in places.items() if at == BACK))
        steps = {n: at for n, at in sorted(places.items()) if at != BACK}
        if len(set(steps.values())) != 1:
            raise ValueError(f"processes meet after different steps, {steps}: give all one plan.")
        devices = np.array([d for d in jax.devices() if d.process_index in found])
        self._known, (step, *_) = found, steps.values()
        self.met = Meeting(step, tuple(sorted(found)), new, Mesh(devices, (AXIS,)))
        return self.met

    def __call__(self, step: int, *trees: PyTree, weight: Any = None) -> tuple:
        """The trees after a sync of the living, which has the step `survivors.met.step`.

        Args:
          step: how many steps this process has taken; equal on all that live.
          trees: leaves [n, ...] for this process's n devices; weight: [n], as of `pmean`.

        Raises:
          TimeoutError, ValueError: as `meet`; RuntimeError: if a process dies in the middle.
        """
        met, count = self.meet(step), jax.local_device_count()
        if met.new:
            weight = np.ones(count, np.float32) if weight is None else weight
            weight = np.zeros(count, np.float32) if jax.process_index() in met.new else weight
        key = met.living, met.new, weight is None
        if key not in self.compiled:
            new = [device.process_index in met.new for device in met.mesh.devices]

            def one(trees, weight):
                trees = taken_over(trees, new) if any(new) else trees
                return tuple(self._sync(*trees, **({} if weight is None else {"weight": weight})))

            mapped = map_workers(one, met.mesh, in_specs="worker", out_specs="worker")
            self.compiled[key] = jax.jit(mapped)
        across = multihost_utils.host_local_array_to_global_array
        given = across((trees, weight), met.mesh, jax.P(AXIS))
        self.compiled[key].trace(*given)  # raises here what is wrong with the trees
        found = self._waited(lambda: jax.block_until_ready(self.compiled[key](*given)), step)
        return multihost_utils.global_array_to_host_local_array(found, met.mesh, jax.P(AXIS))

    def leave(self, step: int) -> None:
        """At the end of a run, instead of JAX's own shutdown, which would wait for the dead."""
        self.meet(step)
        if (client := coordination_client()) is not None:
            if not jax.process_index():  # last, as the others cannot leave without the service
                everyone = list(range(jax.process_count()))
                self._waited(lambda: client.get_live_nodes(everyone), step)
            jax.distributed.shutdown()

    def _waited(self, call: Callable, step: int) -> Any:
        """What a call returns that waits for others, which no thread can end."""
        future = concurrent.futures.Future()

        def run():
            try:
                future.set_result(call())
            except Exception as error:
                future.set_exception(error)

        threading.Thread(target=run, daemon=True).start()
        told = f"process {jax.process_index()} after step {step}"
        living = list(self.met.living) if self.met else "of the run"
        then = "look at their output, and give the command again, from the last checkpoint."
        try:
            return future.result(self._patience)
        except concurrent.futures.TimeoutError:
            places = _places()
            late = {n: places.get(n) for n in range(jax.process_count()) if places.get(n) != step}
            names = ", ".join(f"process {n} (last met after step {at})" for n, at in late.items())
            names = names or f"the sync of processes {living}"
            text = f"{told} has waited {self._patience:g} s for {names}: {then}"
            raise TimeoutError(text) from None
        except (RuntimeError, ValueError) as error:  # XLA raises either
            raise RuntimeError(f"{told} has lost one of processes {living}: {then}") from error


def taken_over(trees: PyTree, new: list[bool], axis_name: str = AXIS) -> PyTree:
    """One worker's trees; a new one's (`new` is of all) are another's, with keys of its own."""
    mine = jax.lax.axis_index(axis_name)
    is_new = jnp.asarray(new)[mine]

    def take(x):
        if is_key(x):
            data = take(jax.random.key_data(x))
            keys = jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
            own = jax.vmap(lambda key: jax.random.fold_in(key, mine))(keys.reshape(-1))
            return jnp.where(is_new, own.reshape(keys.shape), keys)
        wide = x.astype(jnp.int32) if x.dtype == jnp.bool_ else x
        given = jax.lax.psum(jnp.where(mine == new.index(False), wide, 0), axis_name)
        return jnp.where(is_new, given, wide).astype(x.dtype)

    return jax.tree.map(take, trees)


def _places() -> dict[int, int]:
    """{process: the step of its last meeting}."""
    found = () if (client := coordination_client()) is None else client.key_value_dir_get(PLACES)
    return {int(key.rpartition("/")[2]): int(step) for key, step in found}
