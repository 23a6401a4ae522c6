"""How entrypoints define their flags, into any `FlagValues`: tests and twins have their own."""

import sys
from collections.abc import Callable

from absl import flags


def definer(values: flags.FlagValues) -> Callable:
    """`define(kind, name, default, text, *more, **options)`, a flag of `absl.flags` in one line.

    Args:
      values: where the flags go.

    Example:
      >>> from absl import flags
      >>> from experiments import flag_values
      >>> values = flags.FlagValues()
      >>> define = flag_values.definer(values)
      >>> define(flags.DEFINE_integer, "workers", 4, "W", lower_bound=1)
      >>> define(flags.DEFINE_enum, "run", "vmap", "where", ["vmap", "mesh"])
      >>> values(["program", "--workers=2"])
      ['program']
      >>> values.workers, values.run
      (2, 'vmap')
    """

    def define(kind, name, default, text, *more, **options):
        kind(name, default, *more, text, flag_values=values, **options)
        # --help shows what belongs to the program, wherever it is defined.
        values.register_key_flag_for_module(sys.argv[0], values[name])

    return define
