"""Memory of a sync, compiled for devices that are not there: rows of `bench --part=memory`.

Bytes are of one device with one worker. The workers' optimizer keeps no state here: what it keeps
is untouched by a sync, and adds to both arguments and peak (two copies with AdamW).
"""

from collections.abc import Callable, Iterator

import jax
import optax

import local_opt
import models
from experiments.cluster.devices import owned_sharding
from experiments.results.tables import show_bytes
from experiments.study.cost import Refused, compile_or_refuse, slice_of, tree_bytes
from local_opt.workers import AXIS
from models.gpt2 import SIZES as OF_GPT2
from models.vit import SIZES as OF_VIT

WORKERS, FRAGMENTS = 8, 4
SLICES = {"v5e": "v5e:2x4", "h100": "h100:8"}
MODELS = {
    "vit": lambda: models.vit(image_shape=(224, 224, 3), num_classes=1000, **OF_VIT["base"]),
    "gpt2": lambda: models.gpt2(vocab_size=50257, context=1024, **OF_GPT2["small"]),
    "gpt_1b": lambda: models.gpt2(vocab_size=50257, context=1024, width=2048, depth=18, heads=16),
}
NESTEROV = optax.sgd(0.7, momentum=0.9, nesterov=True)
WAYS = {  # options of local_rounds
    "plain": {},
    "DiLoCo": {"outer": NESTEROV},
    "SlowMo": {"outer": optax.sgd(1.0, momentum=0.5)},
    **{name: {"wire": local_opt.WIRES[name]} for name in ("bfloat16", "int8", "int4", "top_k")},
    "DiLoCo, int4": {"outer": NESTEROV, "wire": local_opt.WIRES["int4"]},
}
STREAMED = ("DiLoCo", "DiLoCo, int4")


def programs_of() -> Iterator[tuple[str, Callable, Callable]]:
    """(name, init, program) of each: `(params, state) -> (params, state)` of one worker."""
    inner = optax.sgd(0.1)
    for name, options in WAYS.items():
        rounds = local_opt.local_rounds(inner, axis_name=AXIS, **options)
        yield name, rounds.init, lambda x, s, rounds=rounds: rounds.sync(x, s)
    for name in STREAMED:
        stream = local_opt.streaming_rounds(inner, fragments=FRAGMENTS, **WAYS[name])
        start = lambda x, s, of=stream: (x, of.start(x, s, fragment=1))  # noqa: E731
        yield f"{name}, start of a fragment", stream.init, start
        finish = lambda x, s, of=stream: of.finish(x, s, fragment=1)  # noqa: E731
        yield f"{name}, finish", stream.init, finish


def memory_rows(chip_name: str, model_name: str) -> Iterator[dict]:
    """What a sync takes beyond the state that is held between steps, which is donated."""
    mesh, chip = slice_of(SLICES[chip_name], WORKERS)
    params = jax.eval_shape(MODELS[model_name]().init, jax.random.key(0))
    place, size = owned_sharding(mesh), tree_bytes(params)

    def owned(tree):
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct((WORKERS, *x.shape), x.dtype, sharding=place), tree
        )

    for name, init, program in programs_of():
        args = owned(params), owned(jax.eval_shape(init, params))
        run = local_opt.lift(program, mesh, "owned owned -> owned owned")
        found = compile_or_refuse(jax.jit(run, donate_argnums=(0, 1)).lower(*args), chip)
        row = {"chip": chip_name, "model": model_name, "parameters": show_bytes(size), "sync": name}
        if isinstance(found, Refused):
            needed = f"does not fit: {show_bytes(found.needed)}"
            yield row | dict.fromkeys(("held", "temporaries"), "-") | {
                "peak": needed, "copies_more": "-", "collectives": "-", "sent": "-"
            }  # fmt: skip
            continue
        memory, sent = found.memory, found.collectives
        yield row | {
            "held": show_bytes(memory["arguments"]),
            "temporaries": show_bytes(memory["temporaries"]),
            "peak": show_bytes(memory["peak"]),
            "copies_more": round((memory["peak"] - memory["arguments"]) / size, 2),
            "collectives": len(sent),
            "sent": show_bytes(sum(one.bytes for one in sent)),
        }  # fmt: skip
