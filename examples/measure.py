"""What the files of an example reach over seeds, each at its best learning rate.

    python examples/measure.py gpt --scalar=valid --learning_rates=1e-3,3e-3,1e-2 --seeds=3

prints means and 95 % intervals (Student's t) of all numbers that `main` of a file returns. The rate
with the lowest mean of --scalar is chosen.
"""

import importlib.util
import pathlib
import sys

import numpy as np
from absl import app, flags
from scipy.special import stdtrit
from tqdm import tqdm

FOLDER = pathlib.Path(__file__).parent
FLAGS = flags.FLAGS
flags.DEFINE_string("scalar", "valid", "the number of `main` that chooses the rate")
flags.DEFINE_list("learning_rates", ["1e-3"], "rates for every file")
flags.DEFINE_integer("seeds", 3, "seeds of every file and rate", lower_bound=2)


def has_main(path: pathlib.Path) -> bool:
    return "def main(" in path.read_text()


def main_of(path: pathlib.Path):
    """The `main` of a file, which may import files beside it, as a script may."""
    sys.path.insert(0, str(path.parent))
    try:
        spec = importlib.util.spec_from_file_location(f"example_{path.stem}", path)
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module  # dataclasses look their module up
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(path.parent))
    return module.main


def measured(mains, rates, seeds) -> dict:
    """{file: {rate: [what main returned, by seed]}}."""
    calls = [(name, rate, seed) for name in mains for rate in rates for seed in range(seeds)]
    runs = {name: {rate: [] for rate in rates} for name in mains}
    for name, rate, seed in tqdm(calls):
        runs[name][rate].append(flat(mains[name](seed=seed, learning_rate=rate)))
    return runs


def flat(result) -> dict:
    """{"valid loss": ...} of {"valid": {"loss": ...}}, and numbers as they are."""
    numbers = {}
    for name, value in result.items():
        inner = value.items() if isinstance(value, dict) else [("", value)]
        numbers |= {f"{name} {k}".strip(): v for k, v in inner if isinstance(v, int | float)}
    return numbers


def best(runs, scalar):
    """(rate, its results)."""
    return min(runs.items(), key=lambda item: np.mean([r[scalar] for r in item[1]]))


def interval(values) -> tuple[float, float]:
    """Mean, and half width of Student's t interval at 95 %, which is nan for one value."""
    values = np.asarray([*values], float)
    if (count := len(values)) < 2:
        return float(values.mean()), float("nan")
    half = stdtrit(count - 1, 0.975) * values.std(ddof=1) / np.sqrt(count)
    return float(values.mean()), float(half)


def table(rows) -> str:
    """Rows with equal keys as an aligned Markdown table."""
    lines = [list(rows[0]), *([str(v) for v in row.values()] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    lines.insert(1, ["-" * width for width in widths])
    return "\n".join("| " + " | ".join(map(str.ljust, line, widths)) + " |" for line in lines)


def main(argv) -> None:
    folders = sorted(p.parent.name for p in FOLDER.glob("*/plain.py") if has_main(p))
    if len(argv) != 2 or argv[1] not in folders:
        raise app.UsageError(f"pass one folder of {', '.join(folders)}.")
    paths = sorted((FOLDER / argv[1]).glob("*.py"), key=lambda p: (p.stem != "plain", p.stem))
    report({f"{p.stem}.py": main_of(p) for p in paths if has_main(p)})


def report(mains) -> dict:
    """Prints the table of {file: its `main`}; returns {file: (its best rate, its results)}."""
    runs = measured(mains, [float(r) for r in FLAGS.learning_rates], FLAGS.seeds)
    rows, chosen = [], {name: best(of, FLAGS.scalar) for name, of in runs.items()}
    for name, (rate, results) in chosen.items():
        cells = {k: "{:.4g} ± {:.2g}".format(*interval(r[k] for r in results)) for k in results[0]}
        rows.append({"file": name, "best lr": f"{rate:g}", **cells})
    print(table(rows))
    return chosen


if __name__ == "__main__":
    app.run(main)
