"""The calls of `ordering.blocks`: valid arguments, and bad ones for each."""

import os
import tempfile

import jax
import jax.numpy as jnp
import numpy as np

import ordering
from ordering import blocks
from tests.bad_values import (
    KEY,
    NOTHING,
    THING,
    Arg,
    Foreign,
    X,
    but_none,
    call,
    whole,
    word,
)

FOLDER = tempfile.mkdtemp()
PATH, TEXT, LOST = (os.path.join(FOLDER, name) for name in ("x.npy", "x.bin", "lost.npy"))
np.save(PATH, np.arange(12))
np.arange(13, dtype=np.uint16).tofile(TEXT)
NO_PATHS = [None, 3, 0.5, THING, {}, [], "", b"x.npy", LOST, FOLDER, [LOST], [3], [None], {"a": 1},
            os.path.join(FOLDER, "*.npz"), np.arange(3), KEY]  # fmt: skip
(PART,) = blocks.files(PATH)
NO_PARTS = [
    None, 3, "text", b"text", THING, {}, [], (), np.ones(()), np.ones((0, 3)), {"x": "text"},
    {"x": np.ones(3), "y": np.ones(4)}, {"x": 3}, [1, None], dict, iter([1, 2]), KEY, PART, PATH,
    [PART, 3], (PART, None), {"x": THING}, [[1, 2], [1]],
]  # fmt: skip
KEPT = np.arange(12) % 3 != 0
NO_ARRAYS = [
    [],
    KEPT[:5],
    KEPT.astype(int),
    KEPT * 0.5,
    KEPT[None],
    np.zeros(12, bool),
    [None] * 12,
]
NO_RULES = [lambda: True, lambda a, b: True, lambda record: False]
NO_FILTERS = [*but_none(NOTHING), *NO_ARRAYS, *NO_RULES, Foreign(12)]
BLOCKS = blocks.split(np.arange(12), unit_size=2)  # 6 units
NO_BLOCKS = [None, 3, "text", THING, {}, [], np.arange(12), [PART], PART, blocks.files, KEY]
WINDOW = Arg(2, [4, *but_none(whole())])


def order_of(workers):
    """(an order of 6 units for so many workers, its states)."""
    order = ordering.global_reshuffling(6 // workers)
    keys = jax.random.split(KEY, workers)
    return order, jax.vmap(order.init, (0, None), axis_name="worker")(keys, None)


(ORDER, STATE), (OF_ONE, FRESH) = order_of(2), order_of(1)
SINGLE = ordering.random_reshuffling(6)
SINGLE_STATE = SINGLE.init(KEY, None)
MAKE = ordering.global_reshuffling
NO_ORDERS = [*NOTHING, STATE, lambda: ORDER, MAKE, MAKE(5)]


def read(blocks_=BLOCKS, order=ORDER, key=KEY, **args):
    given = {"window": 2, "batch_size": 2, "workers": 2} | args
    with blocks.read_blocks(blocks_, order, key, **given) as reads:
        return next(reads)


with blocks.read_blocks(BLOCKS, ORDER, KEY, window=2, batch_size=2, workers=2) as first:
    next(first), next(first)  # a window
    POSITION = first.state()
CHANGES = {
    "units": [np.array(99), -1], "epoch": ["a", -1], "seed": [np.arange(4)],
    "files": [POSITION.files + 1, None], "batch": [THING, 0.5, [1, 2]], "filter": [np.array(3)],
    "order": [{}, FRESH], "unit_size": [3],
}  # fmt: skip
NO_POSITIONS = [
    *but_none(NOTHING),
    STATE,
    POSITION._asdict() | {"batch": None},
    {name: value for name, value in POSITION._asdict().items() if name != "units"},
    *(POSITION._replace(**{name: x}) for name, values in CHANGES.items() for x in values),
]
SUMS = {"w": jnp.zeros((2, 3))}
ROWS = {"w": jnp.ones((3, 3))}
PLACES = jnp.array([0, 1, -1])
PAIRS = ordering.pair_balance(6, units_per_step=2)

CALLS = {
    "files": call(
        lambda **args: len(blocks.files(**args)), paths=Arg(PATH, NO_PATHS),
        kind=Arg("npy", but_none(word())),
        columns=Arg(None, [3, "text", THING, {}, [], [3], ["a", "a"], [None]])),
    "tokens": call(
        lambda **args: len(blocks.tokens(**args)), paths=Arg(TEXT, [PATH + "x", *NO_PATHS]),
        length=Arg(3, [13, *whole()]), separator=Arg(0, but_none(whole(0))),
        separator_at=Arg("end", word()),
        dtype=Arg("uint16", but_none([*word("float32", jnp.bfloat16), bool])),
        header_bytes=Arg(0, but_none([*whole(0), 99]))),
    "split": call(
        lambda **args: len(blocks.split(**args)), parts=Arg([PART], NO_PARTS), unit_size=2,
        multiple_of=Arg(2, whole()), keep=Arg(KEPT, NO_FILTERS),
        decode=Arg(None, [3, "text", THING, lambda: 0, lambda a, b: a])),
    "read_blocks": call(
        read, blocks_=Arg(BLOCKS, NO_BLOCKS), order=Arg(ORDER, NO_ORDERS),
        key=Arg(KEY, [None, 3, "text", THING, jax.random.split(KEY, 2)]), window=WINDOW,
        workers=Arg(2, [0, -1, 0.5, "text", THING, 3]), batch_size=2, seed=0,
        num_epochs=Arg(2, but_none(whole(0))), readers=Arg(2, whole()),
        state=Arg(POSITION, NO_POSITIONS), depth=2, timeout=30.0),
    "resize": call(
        blocks.resize, state=Arg(POSITION, [3, "text", THING, {}, STATE]),
        fresh=Arg(FRESH, [None, 3, THING, SINGLE_STATE, {}, POSITION, order_of(3)[1]]),
        order=Arg(OF_ONE, [None, 3, THING, STATE, ordering.global_reshuffling, PAIRS])),
    "add_gradients": call(
        blocks.add_gradients, sums=Arg(SUMS, [None, 3, THING, X, {"v": ROWS["w"]}, {}, BLOCKS]),
        gradients=Arg(ROWS, [None, 3, THING, X, jnp.ones(3), {"v": ROWS["w"]}]),
        places=Arg(PLACES, [None, 3, THING, PLACES[:2], PLACES[None], PLACES * 0.5, [0, 1, 1]])),
}  # fmt: skip
