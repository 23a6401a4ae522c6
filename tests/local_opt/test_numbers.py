"""Numbers of wires, resizes and corrections, out of range or none, are refused by name.

Those of the public functions are in tests/project/test_bad_inputs.py.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import local_opt
from local_opt import formats, resize
from tests.bad_values import drawn, real, whole

ONE = jnp.ones(2)
STREAM = local_opt.streaming_rounds(optax.sgd(0.1), fragments=1)


def corrected(rate):
    rounds = local_opt.local_rounds(optax.sgd(0.1), correction=local_opt.control_variates())
    return rounds.update(ONE, rounds.init(ONE), ONE, rate=rate)


SCALARS = ("1", 1j, np.ones(2), jnp.ones(1), set(), jax.random.key(0), 10**400)
CALLS = {  # {function, argument: (call, values)}
    "float_wire, feedback": (lambda v: formats.float_wire("bfloat16", feedback=v), real(1.5)),
    "integer_wire, feedback": (lambda v: formats.integer_wire(8, feedback=v), real(1.5)),
    "integer_wire, bits": (formats.integer_wire, whole()),
    "top_k_wire, feedback": (lambda v: formats.top_k_wire(1 / 64, feedback=v), real(0)),
    "top_k_wire, density": (formats.top_k_wire, real(0)),
    "top_k_wire, bits": (lambda v: formats.top_k_wire(1 / 64, bits=v), [4, *whole()]),
    "top_k_wire, block": (lambda v: formats.top_k_wire(0.5, block=v), [100, *whole()]),
    "mean_of, workers": (lambda v: resize.mean_of(ONE, v), whole()),
    "resize, workers": (lambda v: resize.resize(STREAM.init(ONE), None, v, "mean"), whole()),
    "control_variates, rate": (corrected, SCALARS),
    "proximal, strength": (local_opt.proximal, [10**400]),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_what_is_no_such_number_is_refused(name):
    argument, (call, wrong) = name.split(", ")[-1], CALLS[name]
    for value in drawn(wrong, name):
        with pytest.raises(ValueError) as error:
            call(value)
        text = str(error.value)
        assert text.startswith(f"{argument} is {value!r}"[:40]), (value, text)
        assert ": " in text, "what to pass instead"


def test_numbers_of_numpy_and_jax_are_numbers():
    for one in (np.float64(0.5), jnp.float32(0.5), np.array(0.5)):
        formats.top_k_wire(one, feedback=one)
