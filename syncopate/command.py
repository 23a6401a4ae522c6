"""The console command: `syncopate NAME ...` runs an experiment, whatever the current folder holds.

`--preset=NAME` stands for the flags in the file experiments/presets/NAME.flags.
"""

import ast
import difflib
import os
import pathlib
import runpy
import sys
from collections.abc import Iterable, Sequence

import syncopate

# The extra of setup.cfg that all experiments need, and the modules of its extra "data".
EXTRA = "experiments"
OF_DATA = (
    "array_record",
    "google_crc32c",
    "importlib_resources",
    "PIL",
    "pyarrow",
    "tensorflow",
    "tensorflow_datasets",
)
INCLUDED = "--flagfile=experiments/presets/"  # the first line of a preset that extends another


def main(argv: list[str] | None = None) -> None:
    """Runs the experiment that the first argument names, or exits and lists what there is."""
    argv = sys.argv[1:] if argv is None else argv
    name, *flags = argv or ["--help"]
    if name not in (names := experiments()):
        rows = "\n".join(f"  {name:14}{purpose}" for name, purpose in names.items())
        usage = (
            "syncopate NAME [--flag=value ...]; --help after a name. Times: two cores.\n"
            f"Experiments need more than the library: {syncopate.install(EXTRA)}\n{rows}"
        )
        if name in ("-h", "--help", "--version"):
            print(usage if name != "--version" else f"syncopate {syncopate.__version__}")
            return
        near = meant(name, names)
        sys.exit(f"{name!r} is not an experiment: pass one of these.{near}\n{usage}")
    sys.argv = [name, *flags]
    # In front of everything else, here and in the processes that an experiment starts.
    sys.path.insert(0, str(sources()))
    paths = [str(sources()), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    try:
        runpy.run_module(f"experiments.{name}", run_name="__main__", alter_sys=True)
    except ModuleNotFoundError as error:
        of_data = (error.name or "").partition(".")[0] in OF_DATA
        command = syncopate.install(EXTRA, *["data"] * of_data)
        sys.exit(f"{error}: {name} needs more than the library. Install it as {command}.")


def sources() -> pathlib.Path:
    """The folder of `experiments` and `models`: in a wheel `_bundled`, in a clone its root."""
    bundled = pathlib.Path(__file__).with_name("_bundled")
    return bundled if bundled.is_dir() else bundled.parents[1]


def experiments() -> dict[str, str]:
    """The experiments, each with the first line of its docstring and its time, if that is there."""
    result = {}
    for path in sorted((sources() / "experiments").glob("*.py")):
        if path.stem == "claims" and not (sources() / "docs").is_dir():
            continue  # the records that it reads are those of a clone
        text = path.read_text(encoding="utf-8")
        if '__name__ == "__main__"' in text:
            lines = (ast.get_docstring(ast.parse(text)) or "").splitlines()
            purpose, _, example, *_ = [*lines, "", "", ""]
            time = example.partition(" # ")[2].rpartition(": ")[2]
            result[path.stem] = f"{purpose} ({time})" if time else purpose
    return result


def meant(word: str, names: Iterable[str], start: str = "") -> str:
    """A question as " Did you mean --learning_rate?", for "lr" or "learning_rat"; "" for none."""
    initials = {"".join(part[:1] for part in name.split("_")): name for name in names}
    near = [initials[word]] if word in initials else difflib.get_close_matches(word, names)
    return f" Did you mean {' or '.join(start + name for name in near)}?" if near else ""


def with_presets(argv: Sequence[str]) -> list[str]:
    """The arguments, with the flags of a preset in place of --preset=NAME or --preset NAME."""
    arguments, rest = [], iter(argv)
    for argument in rest:
        flag, given, name = argument.partition("=")
        if flag in ("--preset", "-preset"):
            arguments += preset(name if given else next(rest, ""))
        else:
            arguments.append(argument)
    return arguments


def preset(name: str) -> list[str]:
    """The flags of a preset; SystemExit with the known ones if there is none of that name."""
    presets = sources() / "experiments" / "presets"
    path = presets / f"{name}.flags"
    if not path.is_file():
        names = sorted(
            str(p.relative_to(presets).with_suffix("")) for p in presets.rglob("*.flags")
        )
        sys.exit(f"{name!r} is not a preset: pass one of {', '.join(names)}.{meant(name, names)}")
    arguments = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith(INCLUDED):
            arguments += preset(line.removeprefix(INCLUDED).removesuffix(".flags"))
        elif line.startswith("--"):
            arguments.append(line)
    return arguments


if __name__ == "__main__":
    main()
