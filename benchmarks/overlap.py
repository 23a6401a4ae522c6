"""What a fragment's transfer hides behind a step, in the compiled schedule of two slices.

Rows of `bench --part=overlap`. Two workers, each a slice v5e:4x4 over which parameters are split,
train a GPT by Streaming DiLoCo: a fragment is sent, a step is computed, the fragment is merged.
Nothing of this is there: libtpu compiles the program, and its schedule says between which
instructions a transfer begins and is waited for.

Seconds of computation are libtpu's estimates, in which collectives inside a slice take none: what
is hidden is rather more. A transfer takes its bytes over the link of a host, which its chips share.
"""

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import local_opt
import models
from experiments.study.cost import computations, result_bytes, stay_on_cpu, uncached
from local_opt.workers import AXIS
from syncopate.unstable import topologies

SLICES, CHIPS, CHIPS_OF_HOST, HERTZ = 2, (4, 4), 4, 940e6  # of a v5e
GIGABITS = (25, 100, 400)  # per second, of a host
BATCH, CONTEXT, FRAGMENTS = 16, 1024, 3  # examples of a worker in a step; every third layer
MODELS = {  # 1.0 and 0.26 billion parameters
    "gpt_1b": {"width": 4096, "depth": 4, "heads": 32},
    "gpt_256m": {"width": 2048, "depth": 3, "heads": 16},
}
ADAMW, NESTEROV = optax.adamw(1e-4), optax.sgd(0.7, momentum=0.9, nesterov=True)
INSTRUCTION = re.compile(r"\s+(?:ROOT )?%?([\w.\-]+) = (.*?) ([\w\-]+)\(([^)]*)\)")


class Moment(NamedTuple):
    """Where the schedule of a program begins a transfer, or waits for it."""

    begins: bool
    transfer: str
    bytes: int  # of one chip; 0 where it is waited for
    cycles: int  # of all instructions before


def moments_of(text: str) -> tuple[list[Moment], int]:
    """(moments, cycles of the program) of a program as libtpu prints it."""
    bodies = dict(computations(text))
    entry = re.search(r"^ENTRY %?([\w.\-]+)", text, re.M)[1]

    def cycles_of(line):
        if loop := re.search(r" while\(.*condition=%?([\w.\-]+), body=%?([\w.\-]+)", line):
            limits = re.findall(r"32\[\][^=]* constant\((\d+)\)", "\n".join(bodies[loop[1]]))
            turns = int(limits[0]) if len(limits) == 1 else 1
            return turns * sum(map(cycles_of, bodies[loop[2]]))
        found = re.search(r'"estimated_cycles":"(\d+)"', line)
        return int(found[1]) if found else 0

    found, received, total = [], {}, 0
    for line in bodies[entry]:
        total += cycles_of(line)
        instruction = INSTRUCTION.match(line)
        name, result, kind, operand = instruction.groups() if instruction else ("",) * 4
        if kind in ("send", "recv"):
            transfer = re.search(r'rendezvous="([^"]*)"', line)[1]
            received[name] = transfer
            if kind == "send":
                sent = result_bytes(result.split(", u32[]")[0])  # without the context
                found.append(Moment(True, transfer, sent, total))
        elif kind == "recv-done":
            found.append(Moment(False, received[operand.strip("% ")], 0, total))
    return found, total


def waited_for(moments: Sequence[Moment], bytes_per_second: float) -> tuple[float, float]:
    """(seconds of all transfers, those for which the program waits), one on the link at a time."""
    waited, free, arrives = 0.0, 0.0, {}
    for moment in moments:
        now = moment.cycles / HERTZ + waited
        if moment.begins:
            free = max(free, now) + moment.bytes / bytes_per_second
            arrives[moment.transfer] = free
        else:
            waited += max(0.0, arrives[moment.transfer] - now)
    return sum(moment.bytes for moment in moments) / bytes_per_second, waited


def compiled(model_name: str, wire: str | None, streamed: bool) -> tuple[str, int, int, int]:
    """(the program, parameters, those that are sent, the peak of a chip's bytes)."""
    stay_on_cpu()
    devices = topologies.get_topology_desc(
        platform="tpu", topology_name="v5e:{}x{}".format(*CHIPS), num_slices=SLICES
    ).devices
    devices = sorted(devices, key=lambda device: (device.slice_index, device.id))
    mesh = Mesh(np.array(devices).reshape(SLICES, -1), (AXIS, "model"))
    chips = mesh.shape["model"]
    model = models.gpt2(vocab_size=50304, context=CONTEXT, dtype="bfloat16", **MODELS[model_name])
    params = jax.eval_shape(model.init, jax.random.key(0))
    specs = jax.tree.map(lambda x: _split(x.shape, chips), params)
    labels = jax.tree_util.tree_map_with_path(_fragment, params)
    options = {"wire": wire and local_opt.WIRES[wire], "outer": NESTEROV, "specs": specs}
    rounds = local_opt.local_rounds(ADAMW, **options)
    stream = local_opt.streaming_rounds(ADAMW, fragments=labels, **options)

    def program(params, state, batch):
        params, state, batch = jax.tree.map(lambda x: x[0], (params, state, batch))
        if not streamed:
            return jax.tree.map(lambda x: x[None], rounds.sync(params, state))
        state = stream.start(params, state, fragment=1)
        loss = lambda p: jnp.mean(model.loss(p, batch, jax.random.key(0)))  # noqa: E731
        updates, state = stream.update(jax.grad(loss)(params), state, params)
        params = optax.apply_updates(params, updates)
        return jax.tree.map(lambda x: x[None], stream.finish(params, state, fragment=1))

    def placed(tree, specs):
        def one(x, spec):
            place = NamedSharding(mesh, P(AXIS, *spec))
            return jax.ShapeDtypeStruct((SLICES, *x.shape), x.dtype, sharding=place)

        return jax.tree.map(one, tree, specs)

    state = jax.eval_shape((stream if streamed else rounds).init, params)
    tokens = jax.ShapeDtypeStruct((BATCH, CONTEXT), jnp.int32)
    args = (
        placed(params, specs),
        placed(state, jax.tree.map(lambda x: _split(x.shape, chips), state)),
        placed(dict.fromkeys("xy", tokens), dict.fromkeys("xy", P("model"))),
    )
    run = jax.shard_map(
        program, mesh=mesh, in_specs=P(AXIS), out_specs=P(AXIS), axis_names={AXIS}, check_vma=False
    )
    with uncached():
        found = jax.jit(run, donate_argnums=(0, 1)).lower(*args).compile()
    pairs = zip(jax.tree.leaves(params), jax.tree.leaves(labels), strict=True)
    sent = sum(x.size for x, fragment in pairs if fragment == 1 or not streamed)
    size = sum(x.size for x in jax.tree.leaves(params))
    return found.as_text(), size, sent, found.memory_analysis().peak_memory_in_bytes


def _split(shape: tuple[int, ...], chips: int) -> P:
    """Large arrays are split along their first axis that the chips divide."""
    axes = [a for a, n in enumerate(shape) if n % chips == 0] if np.prod(shape) >= 2**16 else []
    return P(*[None] * axes[0], "model") if axes else P()


def _fragment(path, x) -> int:
    block = re.search(r"block(\d+)", jax.tree_util.keystr(path))
    return int(block[1]) % FRAGMENTS if block else 0


def overlap_rows(name: str) -> Iterator[dict]:
    """Milliseconds of a transfer that are hidden and that are not, at every speed of the link."""
    for streamed, wire in ((True, None), (True, "int4"), (False, None)):
        text, size, sent, peak = compiled(name, wire, streamed)
        moments, cycles = moments_of(text)
        for gigabits in GIGABITS:
            seconds, waited = waited_for(moments, gigabits * 1e9 / 8 / CHIPS_OF_HOST)
            yield {
                "parameters": f"{size:,}",
                "sync": "of a fragment, beside a step" if streamed else "of all",
                "wire": wire or "float32",
                "numbers": f"{sent:,}",
                "MB of a chip": f"{sum(moment.bytes for moment in moments) / 1e6:.1f}",
                "peak of a chip": f"{peak / 1e9:.2f} GB",
                "ms of computation": f"{1e3 * cycles / HERTZ:.1f}",
                "Gb/s of a host": gigabits,
                "ms of the transfer": f"{1e3 * seconds:.1f}",
                "hidden": f"{1e3 * (seconds - waited):.1f}",
                "not hidden": f"{1e3 * waited:.1f}",
            }
