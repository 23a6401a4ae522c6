r"""Which of the three decisions pay where: the map, from recorded factorials.

    python -m experiments.machine_map

Nothing is trained: steps, loads and rounds to the target come from experiments/runs/map_* (each
made by `experiments.combined`; its command is beside it), every combination at its own best
learning rate. Prices them on a grid of machines: what a load and a sync cost in steps, for models
of --parameters, and on --gbps with the loaders of --loads. Writes map.png, table_*.md, map.jsonl
and report.html into --output_dir. Seconds.

Expected: docs/combined.md.
"""

import itertools
import os
from collections.abc import Sequence

import numpy as np
from absl import app, flags

from experiments.advice_parts import machines, maps, recorded
from experiments.flags import definer, positive_numbers
from experiments.results import archive, html, records, tables

FLAGS = flags.FLAGS
FORM = "{:.2f} ({:.2f} to {:.2f})"  # of a factor with its interval
STEP_FLOOR = 1e-4  # seconds: what launching a step costs, however small it is


def define_flags(values: flags.FlagValues = FLAGS) -> None:
    define, number, listed = definer(values), flags.DEFINE_float, flags.DEFINE_list
    define(listed, "parameters", ["1e4", "1e6", "1e8"], "D, of models")
    define(listed, "gbps", ["1", "10", "100", "400"], "Gb/s of a worker's network")
    define(listed, "loaders", ["1e6", "7400"], "examples per second that a worker reads")
    define(number, "device_flops", 1e14, "operations per second of a worker", lower_bound=1.0)
    define(number, "tokens", 256.0, "of an example: its operations are 6 D of these", lower_bound=1)
    define(number, "latency", 3e-5, "seconds of a sync, besides its bytes", lower_bound=0.0)
    define(number, "load_steps", 8.0, "a load of the slow machine, in steps", lower_bound=0.0)
    define(number, "sync_steps", 10.0, "a sync of the slow machine, in steps", lower_bound=0.0)
    define(number, "ordered", 1.05, "times longer a fresh step is with an order", lower_bound=1.0)
    define(flags.DEFINE_string, "runs", str(archive.FOLDER), "folder of recorded factorials")
    define(flags.DEFINE_string, "output_dir", "results/machine_map", "gets what is written")


def step_seconds(found, parameters: float, values) -> float:
    """Of a worker's part of a step: 6 D operations for a token, or what launching takes."""
    examples = found.sizes.units_per_step * found.sizes.unit_size
    return max(STEP_FLOOR, 6 * parameters * values.tokens * examples / values.device_flops)


def choices(known, values) -> list[dict]:
    """A row per factorial, model, network and loader: the best combination, and its rivals."""
    rows = []
    for found in known:
        examples = found.sizes.units_per_step * found.sizes.unit_size
        for d in positive_numbers(values, "parameters"):
            step = step_seconds(found, d, values)
            for gbps in positive_numbers(values, "gbps"):
                sync = machines.sync_seconds(
                    d, found.sizes.workers, gbps=gbps, latency=values.latency
                )
                for speed in positive_numbers(values, "loaders"):
                    machine = machines.Machine(
                        step, examples / speed, sync, d, values.latency, values.ordered
                    )
                    own = machines.choose(machine, found)
                    rows.append({
                        "task": found.task, "size": found.size, "parameters": d, "gbps": gbps,
                        "examples_per_second": speed, "step_seconds": step,
                        "load_steps": machine.load / step, "sync_steps": sync / step,
                        "best": own.best.label, "times": own.times,
                        "rivals": [c.label for c in own.rivals],
                    })  # fmt: skip
    return rows


def choices_table(rows: Sequence[dict]) -> str:
    """A row per model, network and loader, a column per factorial."""
    found = {}
    for row in rows:
        key = (row["parameters"], row["gbps"], row["examples_per_second"])
        cell = f"{row['best']}, × {row['times'][0]:.1f}"
        found.setdefault(key, {})[f"{row['task']}, {row['size']}"] = cell
    lines = [
        {"parameters": f"{d:,.0f}", "Gb/s": f"{g:g}", "examples / s": f"{s:g}"} | cells
        for (d, g, s), cells in found.items()
    ]
    return tables.markdown(lines)


def regret_table(known, values) -> str:
    """What the other tasks' factorials recommend, over the best of a task's own, on machines."""
    lines = []
    for d in positive_numbers(values, "parameters")[-1:]:
        for load, sync in ((0, 0), (8, 0), (0, 10), (2, 2), (8, 10), (30, 100)):
            machine = machines.Machine(1.0, float(load), float(sync), d, ordered=values.ordered)
            for row in maps.regrets(known, machine):
                price = {"load / steps": load, "sync / steps": sync}
                lines.append(price | row | {"regret": f"{100 * row['regret']:.0f} %"})
    return tables.markdown(lines)


def slow_table(known, values) -> str:
    """All three decisions against the best of fewer, on a machine with slow input and network."""
    rows, columns = [], ("the best", "the second", "the third")
    machine = machines.Machine(
        1.0, values.load_steps, values.sync_steps,
        positive_numbers(values, "parameters")[-1], ordered=values.ordered,
    )  # fmt: skip
    for found in known:
        logs = {c: np.log(t) for c, t in machines.times(machine, found).items()}
        every = [c for c in logs if c.decisions == 3]
        row = {"task": found.task, "workers x units": found.size, "all three": "never arrive"}
        row |= {f"against {name} of fewer": "-" for name in columns}
        if every:
            best = min(every, key=lambda c: logs[c].mean())
            behind = {c: machines.factor(logs[c] - logs[best]) for c in logs if c.decisions < 3}
            row["all three"] = f"{best.label}: × {FORM.format(*behind[recorded.Combination()])}"
            for name, c in zip(columns, sorted(behind, key=behind.get), strict=False):
                row[f"against {name} of fewer"] = f"{c.label}: × {FORM.format(*behind[c])}"
        rows.append(row)
    return tables.markdown(rows)


def measured_table(folder) -> str:
    """Seconds where loads and syncs are slow, and how many times those of all three decisions."""
    found, rows = recorded.measured(folder), []
    for combination in dict.fromkeys(c for of in found.values() for c in of):
        row = {"decisions": combination.label}
        for task, of in found.items():
            every = next(seconds for c, seconds in of.items() if c.decisions == 3)
            row[f"{task}, seconds"] = tables.show(of[combination], "{:.1f}")
            times = machines.factor(np.log(of[combination] / every))
            row[f"{task}, times all three"] = FORM.format(*times)
        rows.append(row)
    return tables.markdown(rows)


def gains_table(known) -> str:
    """How many times fewer loads the order takes, where all meet in every step and where not."""
    rows, most = [], {c.uses for found in known for c in found.taken}
    for found in known:
        row = {"task": found.task, "workers x units": found.size}
        for local, uses in itertools.product((False, True), sorted(most)):
            pair = [recorded.Combination(order, local, uses) for order in (False, True)]
            name = f"{'local steps' if local else 'every step'}, e = {uses}"
            row[name] = "-"
            if all(c in found.taken for c in pair):
                plain, order = (np.log(found.taken[c].loads) for c in pair)
                row[name] = FORM.format(*machines.factor(plain - order))
        rows.append(row)
    return tables.markdown(rows)


def main(argv: Sequence[str], values: flags.FlagValues = FLAGS) -> None:
    del argv
    known, folder = recorded.load(values.runs), values.output_dir
    if not known:
        raise app.UsageError(
            f"--runs is {values.runs!r}, which holds no map_TASK_WxB_eUSES: record factorials of "
            "`experiments.combined` there by `experiments.verdicts --record`."
        )
    records.open_folder(folder, {"runs": values.runs}, overwrite=True)
    rows = choices(known, values)
    records.write_lines(os.path.join(folder, "map.jsonl"), rows)
    written = {
        "slow": slow_table(known, values),
        "measured": measured_table(values.runs),
        "gains": gains_table(known),
        "choices": choices_table(rows),
        "regret": regret_table(known, values),
    }
    for name, text in written.items():
        records.write_whole(os.path.join(folder, f"table_{name}.md"), text + "\n")
        print(f"\n{text}")
    sizes = list(dict.fromkeys(found.size for found in known))
    models = positive_numbers(values, "parameters")
    columns = [(size, d) for size in sizes for d in (models[0], models[-1])]
    lines = []
    for task in dict.fromkeys(found.task for found in known):
        own = {found.size: found for found in known if found.task == task}
        if set(own) == set(sizes):
            lines.append((task, [
                (f"{size}, {d:,.0f} parameters", maps.draw(own[size], d, ordered=values.ordered))
                for size, d in columns
            ]))  # fmt: skip
    maps.picture(
        lines, os.path.join(folder, "map.png"),
        "The best combination of decisions to one training loss (workers x units per step)\n"
        "lines: times as fast as none of them",
    )  # fmt: skip
    html.of_folder(folder, title="Where the three decisions pay", command=html.command_line())
    print(f"\nWritten to {folder}")


if __name__ == "__main__":
    define_flags()
    app.run(main)
