r"""What does it cost? Eight benchmarks, a module of `experiments.bench_parts` each.

    python -m experiments.bench --part=balance                  # minutes: kernel and step
    python -m experiments.bench --part=balance --rows=sweep     # block sizes, for ordering.balance
    python -m experiments.bench --part=epochs --data_root=DIR   # minutes, half of them compilation
    python -m experiments.bench --part=epochs --data_root=DIR --rows=hmda,m4 --num_train=0
    python -m experiments.bench --part=epochs --task=digits --arms=rr,cd_grab
    python -m experiments.bench --part=local_steps              # one worker, then a mesh of four
    python -m experiments.bench --part=echo                     # nothing else may run beside it
    python -m experiments.bench --part=echo --ratios=4 --steps=100 --repeats=1
    python -m experiments.bench --part=loops                    # a minute: the loop's own share
    python -m experiments.bench --part=saves                    # minutes: checkpoints' manifests
    python -m experiments.bench --part=samplers                 # minutes: orders through loaders
    python -m experiments.bench --part=beside                   # a minute: several runs in one

balance: the signs of pairs, and a step with them; epochs: epochs of the CD-GraB tasks;
local_steps: a local step and a sync; echo: what slow input leaves of echoing; loops: a step of
the training loop; saves: steps with a checkpoint every 50, with its manifest and without; samplers:
indices per second through Grain and our own readers; beside: a step of one of several runs in one
program. Every part's question, method and aim are in
its module. Prints a table, and the rows as JSON lines into
--jsonl or below it; epochs writes into --output_dir.
"""

from collections.abc import Sequence

from absl import app, flags

from experiments import flags as dialect
from experiments.bench_parts import (
    balance,
    beside,
    echo,
    epochs,
    local_steps,
    loops,
    samplers,
    saves,
)
from experiments.studies.tables import ORDERS

FLAGS = flags.FLAGS
PARTS = {
    p.__name__.rpartition(".")[2]: p
    for p in (balance, beside, echo, epochs, local_steps, loops, samplers, saves)
}


def define_flags(values: flags.FlagValues = FLAGS) -> None:
    dialect.define(values, "task", "setting", task=None)  # all of epochs
    define = dialect.definer(values)
    text, names = flags.DEFINE_string, flags.DEFINE_list
    define(flags.DEFINE_enum, "part", "balance", "what to measure", list(PARTS))
    define(names, "rows", None, "some rows of a part's table; all if unset")
    define(flags.DEFINE_integer, "repeats", None, "timed calls of every row; the part's own if "
           "unset", lower_bound=1)  # fmt: skip
    define(text, "jsonl", None, "file for the rows as JSON lines; standard output if unset")
    define(flags.DEFINE_integer, "steps", 400, "echo: T of every run", lower_bound=2)
    define(names, "ratios", ["2", "4", "8"], "echo: R, loads of so many steps' time")
    define(flags.DEFINE_float, "step_ms", 4.0, "echo: what a step is made to take",
           lower_bound=0.1)  # fmt: skip
    define(text, "data_root", None, "epochs: folder of the sets' folders")
    define(names, "arms", ["rr", "so", "unzip", "id_pair", "cd_grab"],
           f"epochs: orders, of {', '.join(ORDERS)}; rr is the baseline")  # fmt: skip
    define(text, "output_dir", "results/bench_epochs", "epochs: where the numbers go")
    define(flags.DEFINE_bool, "overwrite", False, "epochs: forget another run in that folder")


def main(argv: Sequence[str], values: flags.FlagValues = FLAGS) -> None:
    del argv
    part = PARTS[values.part]
    known = list(part.ROWS) if isinstance(part.ROWS, dict) else []
    if unknown := sorted(set(values.rows or ()) - set(known)):
        choice = f"choose of {', '.join(known)}" if known else "all are measured, leave it out"
        raise app.UsageError(f"--rows has {unknown}, and --part={values.part}: {choice}.")
    part.main(values)


if __name__ == "__main__":
    define_flags()
    app.run(main)
