"""The console command: `syncopate cd_grab --task=digits` is `python -m experiments.cd_grab ...`.

It runs from any folder, whatever files lie there. --preset=NAME stands for the flags in the file of
that name in experiments/presets/, as --preset=tiny/qsr_vit_b_4096.
"""

import ast
import importlib.util
import pathlib
import runpy
import sys

EXTRA = "experiments"  # of setup.cfg: what they need beyond the core
PRESET = "--preset="
INCLUDED = "--flagfile=experiments/presets/"  # in a preset that begins as another one


def main(argv: list[str] | None = None) -> None:
    """Runs the experiment that the first argument names.

    Raises:
      SystemExit: with the list of experiments, for none or another name; for a preset that is not
        there; or if the experiments' dependencies are not installed.
    """
    argv = sys.argv[1:] if argv is None else argv
    known = experiments()
    if not argv or argv[0] not in known:
        told = "\n".join(f"  {name:14}{said}" for name, said in known.items())
        text = f"syncopate NAME [--preset=PRESET] [--flag=value ...]; --help after a name.\n{told}"
        if not argv or argv[0] in ("-h", "--help"):
            print(text)
            return
        sys.exit(f"{argv[0]!r} is no experiment: pass one of these.\n{text}")
    name, *flags = argv
    sys.argv = [name, *(given for flag in flags for given in with_preset(flag))]
    try:
        runpy.run_module(f"experiments.{name}", run_name="__main__", alter_sys=True)
    except ModuleNotFoundError as error:
        sys.exit(
            f"{error}: experiments need more than the library. Install it as "
            f"pip install 'syncopate[{EXTRA}]'."
        )


def folder() -> pathlib.Path:
    """Where the experiments lie; found without importing them."""
    spec = importlib.util.find_spec("experiments")
    return pathlib.Path(spec.submodule_search_locations[0])


def experiments() -> dict[str, str]:
    """{name: what it is for} of all that can be run."""
    found = {}
    for path in sorted(folder().glob("*.py")):
        text = path.read_text(encoding="utf-8")
        if '__name__ == "__main__"' in text:
            found[path.stem] = ast.get_docstring(ast.parse(text)).partition("\n")[0]
    return found


def with_preset(flag: str) -> list[str]:
    """The flag itself, or those of the preset that it names."""
    if not flag.startswith(PRESET):
        return [flag]
    presets, name = folder() / "presets", flag.removeprefix(PRESET)
    path = presets / f"{name}.flags"
    if not path.is_file():
        known = sorted(
            str(p.relative_to(presets).with_suffix("")) for p in presets.rglob("*.flags")
        )
        sys.exit(f"{name!r} is no preset: pass one of {', '.join(known)}.")
    found = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith(INCLUDED):
            other = line.removeprefix(INCLUDED).removesuffix(".flags")
            found += with_preset(f"{PRESET}{other}")
        elif line.startswith("--"):
            found.append(line)
    return found


if __name__ == "__main__":
    main()
