"""Numbers out of range, and what is no number, are refused by name in every function."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import local_opt
from local_opt import resize, wires
from tests.refused import refuses

SGD, ONE, PLAN = optax.sgd(0.1), jnp.ones(2), local_opt.constant(2, total_steps=4)
STREAM = local_opt.streaming_rounds(SGD, fragments=1)
NO_NUMBERS = ("1", None, True, 1j, np.ones(2), np.array(["a"], object), set(), jnp.ones(2), SGD)
NO_FLOATS = (*NO_NUMBERS, float("nan"), float("inf"), -1, 10**400)
NO_WHOLE = (*NO_FLOATS[:-1], 0.5, 2.0, np.float32(3))


def rule(**changes):
    return local_opt.power_rule(
        0.1, **dict(total_steps=8, alpha=0.2, h_base=1, power=1) | changes
    )  # fmt: skip


def cost(**changes):
    given = dict(num_params=8, num_workers=2, step_seconds=1.0, gigabits_per_second=1.0)
    return local_opt.forecast(PLAN, **given | changes)


def diloco(**changes):
    return local_opt.diloco(SGD, local_opt.every_step(44), **changes)


def stepped(**numbers):
    opt = local_opt.local_steps(SGD, PLAN)
    return opt.update(ONE, opt.init(ONE), ONE, **numbers)


def corrected(rate):
    rounds = local_opt.local_rounds(SGD, correction=local_opt.control_variates())
    return rounds.update(ONE, rounds.init(ONE), ONE, rate=rate)


def outer(period):
    return local_opt.normalize_by_period(SGD, h_base=1).update(ONE, SGD.init(ONE), period=period)


# {function, argument: (call, values that are refused beside those of every number)}
FLOATS = {
    "power_rule, alpha": (lambda v: rule(alpha=v), 0),
    "power_rule, power": (lambda v: rule(power=v), 0),
    "aligned, every": (lambda v: local_opt.aligned(PLAN, every=v), 0.5),
    "forecast, step_seconds": (lambda v: cost(step_seconds=v), 0),
    "forecast, gigabits_per_second": (lambda v: cost(gigabits_per_second=v), 0),
    "forecast, latency_seconds": (lambda v: cost(latency_seconds=v), -0.1),
    "proximal, strength": (local_opt.proximal, -0.1),
    "diloco, learning_rate": (lambda v: diloco(learning_rate=v), 0),
    "diloco, momentum": (lambda v: diloco(momentum=v), 1.0),
    "slowmo, momentum": (lambda v: local_opt.slowmo(SGD, PLAN, momentum=v), 1),
    "streaming_rounds, mixing": (
        lambda v: local_opt.streaming_rounds(SGD, fragments=1, mixing=v), 1.0
    ),
    "float_wire, feedback": (lambda v: wires.float_wire("bfloat16", feedback=v), 1.5),
    "integer_wire, feedback": (lambda v: wires.integer_wire(8, feedback=v), 1.5),
    "top_k_wire, feedback": (lambda v: wires.top_k_wire(1 / 64, feedback=v), 0),
    "top_k_wire, density": (wires.top_k_wire, 0),
    "check_synced, ulps": (lambda v: local_opt.check_synced(ONE, ulps=v), -0.5),
}  # fmt: skip
WHOLE = {
    "constant, period": (lambda v: local_opt.constant(v, total_steps=4), 0),
    "constant, offset": (lambda v: local_opt.constant(1, total_steps=4, offset=v), 4),
    "constant, total_steps": (lambda v: local_opt.constant(1, total_steps=v), 0),
    "post_local, period": (lambda v: local_opt.post_local(v, switch_step=1, total_steps=4), 0),
    "post_local, switch_step": (
        lambda v: local_opt.post_local(1, switch_step=v, total_steps=4), 5
    ),
    "swap, switch_step": (lambda v: local_opt.swap(1, switch_step=v, total_steps=4), 5),
    "power_rule, h_base": (lambda v: rule(h_base=v), 0),
    "power_rule, warmup_steps": (lambda v: rule(warmup_steps=v), 9),
    "power_rule, offset": (lambda v: rule(offset=v), 8),
    "from_function, period(0)": (
        lambda v: local_opt.from_function(lambda t: v, total_steps=4), 0
    ),
    "normalize_by_period, h_base": (lambda v: local_opt.normalize_by_period(SGD, h_base=v), 0),
    "forecast, num_params": (lambda v: cost(num_params=v), 0),
    "forecast, num_workers": (lambda v: cost(num_workers=v), 0),
    "forecast, delay": (lambda v: cost(delay=v), -2),
    "stream_segments, start": (lambda v: local_opt.stream_segments({0: PLAN}, start=v), 5),
    "start, fragment": (lambda v: STREAM.start(ONE, STREAM.init(ONE), fragment=v), 1),
    "finish, fragment": (lambda v: STREAM.finish(ONE, STREAM.init(ONE), fragment=v), 1),
    "owned, workers": (lambda v: local_opt.owned(ONE, v), 0),
    "lift, workers": (lambda v: local_opt.lift(len, v, inputs="owned", outputs="owned"), 0),
    "mean_of, workers": (lambda v: resize.mean_of(ONE, v), 0),
    "resize, workers": (lambda v: resize.resize(STREAM.init(ONE), None, v, "mean"), 0),
    "integer_wire, bits": (wires.integer_wire, 8.0),
    "top_k_wire, block": (lambda v: wires.top_k_wire(0.5, block=v), 100),
}  # fmt: skip
# Traced ones, too: their types are checked, not their values.
SCALARS = {
    "update, step": (lambda v: stepped(step=v), 0.5),
    "update, sync": (lambda v: stepped(sync=v), 1),
    "control_variates, rate": (corrected, jnp.ones(1)),
    "normalize_by_period, period": (outer, jnp.ones(1)),
}


def refused(table, wrong):
    return [(name, call, (*wrong, more)) for name, (call, more) in table.items()]


CALLS = [
    *refused(FLOATS, NO_FLOATS),
    *refused(WHOLE, NO_WHOLE),
    *refused(SCALARS, ("1", 1j, np.ones(2), set(), jax.random.key(0), SGD, 10**400)),
]


@pytest.mark.parametrize("name,call,wrong", CALLS, ids=[name for name, *_ in CALLS])
def test_what_is_no_such_number_is_refused(name, call, wrong):
    argument = name.split(", ")[-1]
    for value in wrong:
        with pytest.raises(ValueError) as error:
            call(value)
        text = str(error.value)
        assert text.startswith(f"{argument} is {value!r}"[:40]), (value, text)
        assert ": " in text, "what to pass instead"


def test_numbers_of_numpy_and_jax_are_numbers():
    assert rule(alpha=np.float32(0.2), h_base=np.int64(2)) == rule(alpha=jnp.float32(0.2), h_base=2)
    for one in (np.float64(0.5), jnp.float32(0.5), np.array(0.5)):
        diloco(learning_rate=one, momentum=one), local_opt.proximal(one), rule(power=one)
        wires.top_k_wire(one, feedback=one)
    assert local_opt.sync_bytes(np.int64(1000), num_workers=np.int32(4)) == 6000


def at(*rates):
    return lambda t: rates[int(t) % len(rates)]


test_schedules_of_anything_but_numbers_are_refused = refuses({
    name: (lambda lr=lr: local_opt.qsr(lr, total_steps=4, alpha=0.1, h_base=1), message)
    for name, (lr, message) in {
        "nan": (at(0.1, float("nan")), r"lr\(1\) is nan"),
        "negative": (at(0.1, -1.0), r"lr\(1\) is -1"),
        "text": (at("0.1"), "lr is .*: the values of a schedule must be real"),
        "none": (at(None), "lr is .*: the values of a schedule must be real"),
        "complex": (at(1j), "lr is complex128"),
        "arrays": (at(np.ones(2)), r"lr has the shape \(4, 2\)"),
        "not called": (optax.cosine_decay_schedule, "lr is cosine_decay_schedule: pass a function"),
        "made by": (optax.constant_schedule, "lr is .*: the values of a schedule must be real"),
        "true": (True, "lr is bool"),
        "letters": ("0.1", "lr is .*: the values of a schedule must be real"),
        "key": (jax.random.key(0), "lr is .*: the values of a schedule must be real"),
    }.items()
})  # fmt: skip
