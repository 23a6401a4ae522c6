"""What a compiler says of one program: memory, operations, and what its text holds."""

import contextlib
import re
import time
from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.compilation_cache import compilation_cache

from experiments.compiled import hlo
from local_opt import runners

UNITS = {"": 1.0} | {letter: 1024.0**i for i, letter in enumerate("KMGTPE", 1)}


class Compiled(NamedTuple):
    """Of one device.

    Fields:
      arguments, outputs, temporaries, peak: bytes; what is donated is argument and output. The
        peak is that of the device's memory alone, temporaries also those that never leave the core.
      flops, bytes_accessed: as XLA counts them, every loop's body once; None where it does not.
      contents: of the text; seconds: to compile.
    """

    arguments: int
    outputs: int
    temporaries: int
    donated: int
    peak: int
    flops: float | None
    bytes_accessed: float | None
    contents: hlo.Contents
    seconds: float


class Refused(NamedTuple):
    """A program that the memory does not hold: bytes that it needs, and those that it may have."""

    needed: float
    available: float


def compile_or_refuse(
    lowered: jax.stages.Lowered, *, options: Mapping | None = None, memory: float | None = None
) -> Compiled | Refused:
    """Compiles, and reads what there is to know.

    Args:
      options: of the compiler.
      memory: bytes of a device, if its compiler does not plan with them: all buffers of a program
        are there at once.
    """
    start = time.perf_counter()
    try:
        with uncached():
            program = lowered.compile(compiler_options=options and dict(options))
    except jax.errors.JaxRuntimeError as error:
        if (refused := shortage(str(error))) is None:
            raise
        return refused
    seconds = time.perf_counter() - start
    stats, cost = program.memory_analysis(), program.cost_analysis() or {}
    total = buffer_bytes(program)
    if memory is not None and total > memory:
        return Refused(total, memory)
    planned = getattr(stats, "peak_memory_in_bytes", 0) if memory is None else 0
    return Compiled(
        arguments=stats.argument_size_in_bytes,
        outputs=stats.output_size_in_bytes,
        temporaries=stats.temp_size_in_bytes,
        donated=stats.alias_size_in_bytes,
        peak=planned or total,
        flops=cost.get("flops"),
        bytes_accessed=cost.get("bytes accessed"),
        contents=hlo.contents(program.as_text()),
        seconds=seconds,
    )


def buffer_bytes(program: jax.stages.Compiled) -> int:
    """Of all buffers of a program on one device; what is donated counts once."""
    stats = program.memory_analysis()
    own = stats.output_size_in_bytes - stats.alias_size_in_bytes
    return stats.argument_size_in_bytes + own + stats.temp_size_in_bytes


@contextlib.contextmanager
def uncached():
    """Compiles anew: JAX cannot read programs for absent devices back from its cache on disk."""
    before = jax.config.jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()  # else it goes by what it found when it was first asked
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", before)
        compilation_cache.reset_cache()


def shortage(message: str) -> Refused | None:
    """What a compiler's message says of memory that does not suffice; None: it is about others.

    Example:
      >>> shortage("required for HLO temporaries (20.00G) exceeds available HBM (15.75G).")
      Refused(needed=21474836480.0, available=16911433728.0)
    """
    size = r"([\d.]+)([KMGTPE]?)B?"
    for pattern in (rf"\({size}\) exceeds available \w+ \({size}\)", rf"Used {size} of {size}"):
        if found := re.search(pattern, message):
            needed, unit, available, other = found.groups()
            return Refused(float(needed) * UNITS[unit], float(available) * UNITS[other])
    return None


def available_memory(mesh: jax.sharding.Mesh) -> float | None:
    """Bytes that the compiler gives a program on one device, asked with one that fits nowhere.

    Args:
      mesh: of devices that need not be there.

    Returns:
      None where the compiler takes everything.
    """
    everywhere = runners.shared_sharding(mesh)
    huge = jax.ShapeDtypeStruct((2**22, 2**20), jnp.float32, sharding=everywhere)  # 16 TiB
    found = compile_or_refuse(jax.jit(jnp.tanh).lower(huge))
    return found.available if isinstance(found, Refused) else None
