r"""Which of the three decisions pay where: the map, from recorded factorials.

    python -m experiments.machine_map

Nothing is trained: steps, loads and rounds to the target come from experiments/runs/map_* (each
made by `experiments.combined`; its command is beside it), every combination at its own best
learning rate. Prices them on a grid of machines: what a load and a sync cost in steps, for models
of --parameters, and on --gbps with the loaders of --loads. Writes map.png, table_*.md, map.jsonl
and report.html into --output_dir. Seconds.

Expected: docs/combined.md.
"""

import os
from collections.abc import Sequence

from absl import app, flags

from experiments.advice_parts import machines, maps, recorded
from experiments.flags import definer, positive_numbers
from experiments.results import archive, html, records, tables

FLAGS = flags.FLAGS
STEP_FLOOR = 1e-4  # seconds: what launching a step costs, however small it is


def define_flags(values: flags.FlagValues = FLAGS) -> None:
    define, number, listed = definer(values), flags.DEFINE_float, flags.DEFINE_list
    define(listed, "parameters", ["1e4", "1e6", "1e8"], "D, of models")
    define(listed, "gbps", ["1", "10", "100", "400"], "Gb/s of a worker's network")
    define(listed, "loaders", ["1e6", "7400"], "examples per second that a worker reads")
    define(number, "device_flops", 1e14, "operations per second of a worker", lower_bound=1.0)
    define(number, "tokens", 256.0, "of an example: its operations are 6 D of these", lower_bound=1)
    define(number, "latency", 3e-5, "seconds of a sync, besides its bytes", lower_bound=0.0)
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
    written = {"choices": choices_table(rows), "regret": regret_table(known, values)}
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
