r"""What do local steps do to an example order? Two errors, exactly, on a family of losses.

    python -m experiments.two_errors                             # four minutes on two slow cores
    python -m experiments.two_errors --questions=plans --seeds=2

The family (two_errors_parts/family.py): curvatures shared by all units but for what is expanded to
first order, so that the error of the order and the error of local steps come apart; x is followed
by linear recursions, nothing is trained. Each question is a table: `errors` (both, of every order
and period, at the sizes of digits), `cosine` (what is left after a decay), `powers` (what scales
how), `borders` (the longest period that leaves D-RR's error the larger one: a formula, and runs),
`plans` (rounds that end with half and whole epochs), `corrections` (of local drift), `signs` (what
of digits' units says whether corrections help).

Expected: docs/orders_and_local_steps.md holds the tables.
"""

import os
from collections.abc import Sequence

import numpy as np
from absl import app, flags
from tqdm import tqdm

from experiments.flags import definer, names_of
from experiments.results import html, plots, records, tables
from experiments.two_errors_parts import questions
from experiments.two_errors_parts.orders import ORDERS
from experiments.two_errors_parts.questions import PERIODS, QUESTIONS

FLAGS = flags.FLAGS
FORM = "{:.1e}"


def define_flags(values: flags.FlagValues = FLAGS) -> None:
    define = definer(values)
    define(flags.DEFINE_integer, "seeds", 5, "draws of the units and first orders", lower_bound=1)
    define(flags.DEFINE_list, "questions", [*QUESTIONS], f"of {', '.join(QUESTIONS)}")
    define(flags.DEFINE_string, "output_dir", "results/two_errors", "gets what is written")


def _grid(found: Sequence[dict], field: str, form: str = FORM, head: str = "{}") -> list[dict]:
    """Rows and columns of the records, mean and interval over seeds."""
    cells = {}
    for r in found:
        own = cells.setdefault(r["row"], {}).setdefault(head.format(r.get("column", field)), [])
        own.append(r[field])
    return [
        {"": row} | {name: tables.show(v, form) for name, v in own.items()}
        for row, own in cells.items()
    ]


def _errors(found):
    """The order's error, and local steps' and both together at two periods."""
    shown = [r for r in found if r["column"] in ("H = 4", "H = 24")]
    first = _grid([r | {"column": "order's"} for r in shown if r["column"] == "H = 4"], "order")
    parts = (_grid(shown, field, head=field + ", {}") for field in ("local", "total"))
    return [a | b | c for a, b, c in zip(first, *parts, strict=True)]


def _powers(found):
    rows = [
        _grid([r | {"column": "x"} for r in found], field, "{:+.2f}") for field in ("order", "bias")
    ]
    expected = {r["row"]: r["expected"] for r in found}
    return [
        {
            "the exponent of": a[""], "D-RR's error": a["x"], "expected": expected[a[""]][0],
            "bias of local steps": b["x"], "expected ": expected[a[""]][1],
        }
        for a, b in zip(*rows, strict=True)
    ]  # fmt: skip


def _borders(found):
    """Medians over seeds; "any" where no period is too long, or none of those that were run."""
    rows = {}
    for r in found:
        own = rows.setdefault(r["row"], {"workers x units": r["row"]})
        same = [o for o in found if (o["row"], o["column"]) == (r["row"], r["column"])]
        for field, most in (("formula", 4096), ("run", PERIODS[-1])):
            middle = int(np.median([o[field] for o in same]))
            own[f"{r['column']}, {field}"] = "any" if middle >= most else middle
    return [*rows.values()]


TABLES = {
    "errors": _errors,
    "cosine": lambda found: _grid(found, "total"),
    "powers": _powers,
    "borders": _borders,
    "plans": lambda found: _grid(found, "total"),
    "corrections": lambda found: _grid(found, "total"),
    "signs": lambda found: [
        a | b
        for a, b in zip(*(_grid(found, f, "{:.2f}") for f in ("cosine", "noise")), strict=True)
    ],
}


def picture(found: Sequence[dict], path: str) -> None:
    """Writes a PNG: both errors against H, a panel per setting."""
    figure, (axes,) = plots.panes(1, 2, (12, 5), sharey=True)
    for axis, setting in zip(axes, (questions.SMALL, questions.LARGE), strict=True):
        for i, name in enumerate(("rr", "cd_grab", "id_pair", "round_robin", "chunks")):
            own = [r for r in found if (r["setting"], r["order_name"]) == (setting.label, name)]
            style = {"color": plots.look(i)["color"]}
            at = [np.mean([r["local"] for r in own if r["column"] == f"H = {h}"]) for h in PERIODS]
            axis.plot(PERIODS, at, marker="o", ms=4, **style, label=f"{ORDERS[name][0]}, local")
            level = np.mean([r["order"] for r in own])
            axis.axhline(level, linestyle="--", label=f"{ORDERS[name][0]}, order's", **style)
        axis.set(xscale="log", yscale="log", xlabel="H, steps between two syncs")
        axis.set_title(f"{setting.workers} workers, {setting.units_per_step} units a step")
        axis.set_xticks(PERIODS, [str(h) for h in PERIODS])
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("expected loss above the minimum")
    plots.legend(figure)
    plots.save(
        figure, path, "Two errors of local steps under an order: rate 0.25, 24 steps an epoch"
    )


def main(argv: Sequence[str], values: flags.FlagValues = FLAGS) -> None:
    del argv
    folder, found = values.output_dir, []
    asked = names_of(values, "questions", QUESTIONS)
    records.open_folder(folder, {"seeds": values.seeds, "questions": asked}, overwrite=True)
    for name in asked:
        own = list(tqdm(QUESTIONS[name](values.seeds), desc=name, unit="run"))
        found += own
        records.write_lines(os.path.join(folder, records.METRICS), found)
        text = tables.markdown(TABLES[name](own))
        records.write_whole(os.path.join(folder, f"table_{name}.md"), text + "\n")
        print(f"\n{QUESTIONS[name].__doc__.splitlines()[0]}\n\n{text}")
        if name == "errors":
            picture(own, os.path.join(folder, "two_errors.png"))
    html.of_folder(folder, title="Two errors", command=html.command_line())
    print(f"\nWritten to {folder}")


if __name__ == "__main__":
    define_flags()
    app.run(main)
