"""How a command begins and ends: its flags, and how what went wrong is told.

What its user can mend is one line, `Error: ...`, without a traceback: a flag that does not fit, a
refusal of this code's own, and what the operating system refuses, such as a full disk. Everything
else is an error of this code and has its traceback. The exit code is 1 for both.
"""

import inspect
import os
import re
import shlex
import sys
import textwrap
import threading
import traceback
from collections.abc import Callable, Mapping
from typing import Any

from absl import app, flags, logging

from syncopate.command import meant, with_presets
from syncopate.refusals import UserError

# The settings of JAX for which all experiments are written and tested.
FIXED = {"jax_enable_x64": False, "jax_numpy_dtype_promotion": "standard"}
DEVICES = "--xla_force_host_platform_device_count"  # splits a CPU, and computes the same
# What they refuse is a ValueError, for programs too; the experiments' own is a UserError.
LIBRARIES = ("local_opt", "models", "ordering", "syncopate")
HELP = ("h", "help", "helpshort", "helpfull")
GROUP = "flags of "  # begins the titles of groups of flags, in which --help shows them
MORE = "free memory, or ask for more. Then the same command continues."
NO_MEMORY = f"Error: memory ran out in a thread that others wait for: {MORE}\n".encode()
THIS_COMMAND = f"{GROUP}this command"  # all of which it shows, besides these
SHOWN = (
    "task",
    "data_dir",
    "order",
    "sync",
    "echo",
    "arms",
    "seeds",
    "speeds",
    "workers",
    "epochs",
    "total_steps",
    "learning_rate",
    "learning_rates",
    "output_dir",
    "dry_run",
)


def main(
    define: Callable[[flags.FlagValues], None],
    run: Callable,
    *,
    rest: bool = False,
    defaults: Callable[[flags.FlagValues], Mapping] = lambda values: {},
) -> None:
    """Runs a command, as `python -m` does.

    Args:
      define: defines the flags of the command.
      run: `(parsed flags) -> exit code`; with `rest` it takes the other arguments too.
      defaults: by name of a flag, what counts where it is unset, for --help.
    """
    values = flags.FLAGS
    try:
        define(values)
    except flags.DuplicateFlagError as error:
        sys.exit(
            f"Error: {error}. Fields of a Recipe, keywords of a data set's loader, and options of "
            "rows of all tables are flags: give yours another name."
        )
    text = "of every error, also of those that one line tells"
    flags.DEFINE_bool("traceback", False, text, flag_values=values)
    values.register_key_flag_for_module(f"{GROUP}all commands", values["traceback"])
    sys.excepthook, threading.excepthook = tell, ended

    def parse(argv):
        end = argv.index("--") if "--" in argv else len(argv)
        asked = [word for word in argv[:end] if word[:1] == "-" and word.lstrip("-") in HELP]
        try:
            given = [*(word for word in argv[:end] if word not in asked), *argv[end:]]
            first, *others = values(with_presets(given))
        except flags.UnrecognizedFlagError as error:
            near = meant(error.flagname, values, "--")
            sys.exit(f"Error: --{error.flagname} is no flag.{near} --helpfull lists all.")
        except flags.Error as error:
            sys.exit(f"Error: {error}")
        except (OSError, UnicodeError) as error:
            sys.exit(f"Error: a file of flags cannot be read: {error}.")
        if asked:
            print(help_of(values, defaults(values), full=asked[-1].endswith("full")))
            sys.exit()
        if others and not rest:
            sys.exit(f"Error: {others[0]!r} is no flag: pass --NAME=VALUE. --helpfull lists all.")
        return [first, *others]

    def begin(argv):
        if not values["verbosity"].present:
            # Each checkpoint logs forty lines; errors are raised as well, and told once.
            logging.set_verbosity(logging.FATAL)
        folder = values["output_dir"].value if "output_dir" in values else None
        if folder is not None and os.path.isfile(folder):
            raise UserError(f"--output_dir is {folder!r}, which is a file: pass a folder.")
        if "process_id" not in values or values["process_id"].value is None:
            print("Loading JAX and the experiment", file=sys.stderr, flush=True)
        if not rest:  # what starts other commands needs no JAX
            os.environ.setdefault("PJRT_NPROC", str(max(os.cpu_count() or 1, 2 * cpu_devices())))
            check_jax()
        return run(values, *[argv[1:]] * rest)

    app.run(begin, flags_parser=parse)


def in_words_of_user(text: str) -> str:
    """A text whose commands are as this one was typed: `syncopate NAME`, or with `python -m`."""
    typed = [*sys.orig_argv, "", ""][2].startswith("experiments.")
    return text if typed else text.replace("python -m experiments.", "syncopate ")


def command_line() -> str:
    """The command of this process, as it was typed: python -m MODULE --flags, or syncopate NAME."""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    start = ["python", "-m", spec.name] if spec else ["python", *sys.argv[:1]]
    return in_words_of_user(shlex.join(start + sys.argv[1:]))


def help_of(values: flags.FlagValues, defaults: Mapping[str, Any], *, full: bool) -> str:
    """What a command does, by its docstring, and its usual flags or all of them, in groups."""
    text = in_words_of_user(inspect.cleandoc(sys.modules["__main__"].__doc__ or ""))
    text = text if full else "\n\n".join(text.split("\n\n")[:2])  # the purpose, and examples
    named, count = values.key_flags_by_module_dict(), 1
    text += _entry(
        "--preset=...", "flags of a published experiment, of experiments/presets", "\n\n"
    )
    for title in (title for title in named if title.startswith(GROUP)):
        count += len(named[title])
        shown = [f for f in named[title] if full or title == THIS_COMMAND or f.name in SHOWN]
        text += f"\n\n{title.capitalize()}" * bool(shown)
        for flag in shown:
            value = defaults.get(flag.name) if flag.value is None else flag.value
            several = value if isinstance(value, list | tuple) else [value]
            shown_value = ",".join(f"{v:g}" if isinstance(v, float) else str(v) for v in several)
            more = textwrap.shorten(flag.help, 200)
            if full:
                allowed = flag.parser.syntactic_help.replace(", 2147483647]", ", 2^31)")
                more = flag.help + f" ({allowed})" * bool(allowed)
            text += _entry(f"--{flag.name}={'...' if value is None else shown_value}", more)
    return text if full else f"{text}\n\n--helpfull shows all {count} flags."


def _entry(flag: str, text: str, start: str = "\n") -> str:
    return start + textwrap.fill(f"  {flag:23} {text}", 100, subsequent_indent=" " * 26)


def cpu_devices() -> int:
    """How many devices XLA_FLAGS makes of this CPU.

    XLA launches and runs their programs in one pool of threads. With fewer than two threads for
    each device, launches can take all of those for which a collective waits.
    """
    counts = re.findall(f"{DEVICES}=([0-9]+)", os.environ.get("XLA_FLAGS", ""))
    return int(counts[-1]) if counts else 1


def check_jax() -> None:
    """Refuses settings of JAX under which no experiment was tried."""
    import jax

    for name, value in FIXED.items():
        setting = getattr(jax.config, name)
        if getattr(setting, "value", setting) != value:
            raise UserError(
                f"{name} is {getattr(setting, 'value', setting)}, and the experiments need "
                f"{value}: unset {name.upper()}."
            )


def tell(kind: type, error: BaseException, trace) -> None:
    """A `sys.excepthook` that tells in one line what the user can mend."""
    shown = flags.FLAGS.is_parsed() and flags.FLAGS.traceback
    if shown or not is_refusal(error):
        sys.__excepthook__(kind, error, trace)
    else:
        stopped = kind is KeyboardInterrupt and not str(error)
        message = "Stopped by Ctrl-C." if stopped else f"Error: {str(error) or kind.__name__}"
        message = f"{message}: {MORE}" if _lacks_memory(error) else message
        # At once, beside other processes.
        print(f"{message}\n", end="", file=sys.stderr, flush=True)


def ended(thread: threading.ExceptHookArgs) -> None:
    """A `threading.excepthook` that ends the process if a thread has run out of memory."""
    if issubclass(thread.exc_type, MemoryError) or _lacks_memory(thread.exc_value):
        end_without_memory()
    threading.__excepthook__(thread)


def end_without_memory() -> None:
    """Ends this process with a line of text, as another thread may wait for ever."""
    try:
        os.write(2, NO_MEMORY)  # which needs none
    finally:
        os._exit(1)


def is_refusal(error: BaseException) -> bool:
    """Whether the user can mend an error: it says so itself, or the operating system does."""
    if isinstance(error, UserError | OSError | KeyboardInterrupt) or _lacks_memory(error):
        return True
    if isinstance(error, RuntimeError) and str(error).startswith("RESOURCE_EXHAUSTED"):
        return True  # of a device's memory, by XLA
    return type(error) is ValueError and _raised_in(error) in LIBRARIES


def _lacks_memory(error: BaseException | None) -> bool:
    """Whether memory of the host ran out, also that for another thread."""
    return isinstance(error, MemoryError) or "can't start new thread" in str(error)


def _raised_in(error: BaseException) -> str:
    """The package that has raised an error."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return frame.f_globals.get("__name__", "").partition(".")[0]
