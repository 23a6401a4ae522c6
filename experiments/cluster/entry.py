"""How a command begins and ends: its flags, and how what went wrong is told.

What its user can mend is one line, `Error: ...`, without a traceback: a flag that does not fit, a
refusal of this code's own, and what the operating system refuses, such as a full disk. Everything
else is an error of this code and has its traceback. The exit code is 1 for both.
"""

import os
import sys
import traceback
from collections.abc import Callable

from absl import app, flags, logging

from syncopate.command import with_presets
from syncopate.refusals import UserError

# Of JAX: what all experiments are written for, and tested with.
FIXED = {"jax_enable_x64": False, "jax_numpy_dtype_promotion": "standard"}
# What they refuse is a ValueError, for programs too; the experiments' own is a UserError.
LIBRARIES = ("local_opt", "models", "ordering", "syncopate")


def main(define: Callable[[flags.FlagValues], None], run: Callable, *, rest: bool = False) -> None:
    """Runs a command, as `python -m` does.

    Args:
      define: defines the flags of the command.
      run: called with the parsed flags, and with the other arguments if the command takes such
        (`rest`). Its result is the exit code.
    """
    values = flags.FLAGS
    define(values)
    text = "of every error, also of those that one line tells"
    flags.DEFINE_bool("traceback", False, text, flag_values=values)
    values.register_key_flag_for_module(sys.argv[0], values["traceback"])
    sys.excepthook = tell

    def parse(argv):
        try:
            first, *others = app.parse_flags_with_usage(with_presets(argv))
        except (OSError, UnicodeError) as error:
            sys.exit(f"Error: a file of flags cannot be read: {error}.")
        if others and not rest:
            sys.exit(f"Error: {others[0]!r} is no flag: pass --NAME=VALUE. --help lists all.")
        return [first, *others]

    def begin(argv):
        if not values["verbosity"].present:
            # Each checkpoint logs forty lines; errors are raised as well, and told once.
            logging.set_verbosity(logging.FATAL)
        folder = values["output_dir"].value if "output_dir" in values else None
        if folder is not None and os.path.isfile(folder):
            raise UserError(f"--output_dir is {folder!r}, which is a file: pass a folder.")
        check_jax()
        return run(values, *[argv[1:]] * rest)

    app.run(begin, flags_parser=parse)


def check_jax() -> None:
    """Refuses settings of JAX under which no experiment was tried, where JAX is loaded."""
    for name, value in FIXED.items() if "jax" in sys.modules else ():
        found = getattr(sys.modules["jax"].config, name)
        if getattr(found, "value", found) != value:
            raise UserError(
                f"{name} is {getattr(found, 'value', found)}, and the experiments need "
                f"{value}: unset {name.upper()}."
            )


def tell(kind: type, error: BaseException, trace) -> None:
    """A `sys.excepthook` that tells in one line what the user can mend."""
    shown = flags.FLAGS.is_parsed() and flags.FLAGS.traceback
    if shown or not is_refusal(error):
        sys.__excepthook__(kind, error, trace)
    else:
        print(f"Error: {str(error) or kind.__name__}", file=sys.stderr, flush=True)


def is_refusal(error: BaseException) -> bool:
    """Whether the user can mend an error: it says so itself, or the operating system does."""
    if isinstance(error, UserError | OSError | MemoryError | KeyboardInterrupt):
        return True
    if isinstance(error, RuntimeError) and str(error).startswith("RESOURCE_EXHAUSTED"):
        return True  # of a device's memory, by XLA
    return type(error) is ValueError and _raised_in(error) in LIBRARIES


def _raised_in(error: BaseException) -> str:
    """The package that has raised an error."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return frame.f_globals.get("__name__", "").partition(".")[0]
