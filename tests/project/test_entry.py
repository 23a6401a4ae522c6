"""How a command ends: one line for what its user can mend, a traceback for an error of ours."""

import re
import sys

import jax
import pytest
from absl import flags

from experiments import entry
from syncopate import command
from tests.installed import ROOT, ended


def raised(code, name="experiments.of_a_test"):
    """The error of a code, as of a module of this name."""
    try:
        exec(code, {"__name__": name})
    except BaseException as error:
        return error


REFUSED = "from syncopate.refusals import UserError\n"


@pytest.mark.parametrize(
    "code",
    [
        f"{REFUSED}raise UserError('--seed is -1: pass another.')",
        f"{REFUSED}try: int('a')\nexcept ValueError as e: raise UserError('of ours') from e",
        "open('/nowhere/at/all')",
        "raise OSError(28, 'No space left on device')",
        "raise MemoryError",
        "raise KeyboardInterrupt('signal 2 came twice')",
        "raise RuntimeError('RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes')",
        "import local_opt\nlocal_opt.constant(0, total_steps=3)",
    ],
)
def test_what_the_user_can_mend_is_one_line(code, capsys):
    error = raised(code)
    entry.tell(type(error), error, error.__traceback__)
    text = capsys.readouterr().err
    assert text.startswith(f"Error: {str(error) or type(error).__name__}") and text.count("\n") == 1
    entry.tell(KeyboardInterrupt, KeyboardInterrupt(), None)
    assert capsys.readouterr().err == "Stopped by Ctrl-C.\n"


@pytest.mark.parametrize(
    "code",
    [
        "int('a')",
        "float('b')",
        "import json\njson.loads('{')",
        "raise TypeError('of ours')",
        "import numpy\nnumpy.zeros(3).reshape(2)",
        "raise RuntimeError('other')",
        "{}['a']",
        "raise ValueError('of no user')",
    ],
)
def test_an_error_of_ours_has_its_traceback(code, capsys):
    error = raised(code)
    entry.tell(type(error), error, error.__traceback__)
    assert "Traceback (most recent call last)" in capsys.readouterr().err


@pytest.mark.parametrize("name,value", entry.FIXED.items())
def test_settings_of_jax_that_no_experiment_takes_are_refused(name, value):
    other, before = {False: True, "standard": "strict"}[value], getattr(jax.config, name)
    entry.check_jax()
    jax.config.update(name, other)
    try:
        with pytest.raises(
            ValueError, match=f"{name} is {other}, .* {value}: unset {name.upper()}"
        ):
            entry.check_jax()
    finally:
        jax.config.update(name, before)


def test_a_plain_value_error_is_a_refusal_of_the_libraries_alone():
    code = "raise ValueError('size is 0')"
    assert all(entry.is_refusal(raised(code, f"{name}.rules")) for name in entry.LIBRARIES)
    assert not entry.is_refusal(raised(code, "somebody"))
    for path in (ROOT / "experiments").rglob("*.py"):
        assert "raise ValueError" not in path.read_text(), f"{path}: a command's is a UserError"


def python(*words, **environment):
    return ended([sys.executable, *words], JAX_PLATFORMS="cpu", **environment)


BAD = ("experiments.slow_sde", "--output_dir=/dev/null/x", "--rates=1", "--repetitions=2")


@pytest.mark.parametrize(
    "lines,last,command",
    [
        (1, "Error: 'leftover' is no flag: pass --NAME=VALUE.", [*BAD, "leftover"]),
        (1, "Error: '--seed=1' is no flag", [*BAD, "--", "--seed=1"]),
        (
            1,
            "Error: a file of flags cannot be read: 'utf-8'",
            [*BAD, f"--flagfile={sys.executable}"],
        ),
        (1, "Error: flag --rates=nan: pass a number in [0.001, 1]", [*BAD, "--rates=nan"]),
        (1, "Error: --worker is no flag. Did you mean --workers?", [*BAD, "--worker=3"]),
        (
            1,
            "Error: --lr is no flag. Did you mean --learning_rate",
            ["experiments.train", "--lr=1"],
        ),
        (2, "Error: no experiment: pass --processes=2", ["experiments.launch"]),
        (2, "Error: --workers has 100", ["syncopate.command", "herding", "--num_vectors=3"]),
    ],
)
def test_a_command_that_does_not_fit_ends_with_one(lines, last, command):
    done = python("-m", *command)
    output = done.stderr.splitlines()
    assert (done.returncode, len(output)) == (1, lines) and output[-1].startswith(last), output


PARSED = """
import os, sys
import experiments.compare.flags  # which most commands import
from syncopate import command

for name in command.experiments():
    for flag in ["--help", "--helpfull"] * (name in ("train", "qsr")) + ["--worker=1"]:
        if not os.fork():
            try:
                command.main([name, flag])
            except SystemExit as error:
                told = error.code if isinstance(error.code, str) else ""
            heavy = {"jax", "optax", "pandas", "matplotlib", "tqdm"} & {*sys.modules}
            print(name, flag, bool(told), *heavy, file=sys.__stderr__, flush=True)
            os._exit(0)
        os.wait()
"""


def test_flags_are_parsed_before_jax_is_imported():
    # NumPy starts no threads: Python warns where a process that has some is forked.
    actual = python("-c", PARSED, OPENBLAS_NUM_THREADS=1).stderr.splitlines()
    helps = {"train", "qsr"}  # as all studies
    wanted = [
        f"{name} {flag}"
        for name in command.experiments()
        for flag in [*["--help False", "--helpfull False"] * (name in helps), "--worker=1 True"]
    ]
    assert actual == wanted and helps < {*command.experiments()}


def test_help_shows_a_dozen_flags_with_their_defaults_and_says_where_the_others_are():
    for start in (["experiments.train"], ["syncopate.command", "train"]):
        done = python("-m", *start, "--help", "--task=digits_mlp")
        flags = re.findall(r"^  --(\S+)", done.stdout, re.M)
        assert done.returncode == 0 and 10 <= len(flags) <= 18
        assert {"workers=4", "total_steps=2000", "learning_rate=0.2", "preset=..."} <= {*flags}
        assert re.search(r"\n--helpfull shows all \d\d flags.\n$", done.stdout)
        typed = "syncopate train" if start[1:] else "python -m experiments.train"
        assert f"    {typed} --order=rr" in done.stdout


def test_a_command_under_x64_ends_at_once():
    done = python("-m", "experiments.train", "--output_dir=/dev/null/x", JAX_ENABLE_X64=1)
    assert done.returncode == 1 and done.stderr.splitlines()[1:] == [
        "Error: jax_enable_x64 is True, and the experiments need False: unset JAX_ENABLE_X64."
    ]


def test_a_flag_shows_the_traceback_of_a_refusal():
    done = python("-m", "experiments.herding", "--num_vectors=3", "--traceback")
    first, *_, last = done.stderr.splitlines()[1:]
    assert done.returncode == 1 and first.startswith("Traceback")
    assert "UserError: --workers has 100" in last


def test_two_flags_of_one_name_end_in_one_line():
    def define(values):
        raise flags.DuplicateFlagError("The flag 'scale' is defined twice")

    with pytest.raises(SystemExit, match="'scale' is defined twice. .* give yours another name"):
        entry.main(define, lambda values: None)
