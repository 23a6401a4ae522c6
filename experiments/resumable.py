"""A run that can be stopped at any step, and goes on as if it had not been."""

import contextlib
import os
import shutil
import signal
from collections.abc import Sequence

import ordering
from experiments import checkpoints, interrupts, loop, processes, writers


def train_in(
    folder: str,
    program: loop.Program,
    plans: loop.Plans,
    *,
    seed: int,
    evaluations: int,
    checkpoint_every: int,
    done: Sequence[dict] = (),
    tensorboard: bool = False,
    overwrite: bool = False,
) -> int:
    """Trains in an output folder, from its last checkpoint on, and says where it has written.

    Args:
      folder: gets metrics, plans, checkpoints and in the end the mean model.
      program, plans, seed: of the run.
      evaluations: evenly spread over the run.
      checkpoint_every: steps; 0 saves at the end alone. A signal saves in any case.
      done: records of an earlier call in this folder; those after its checkpoint are made again.
      tensorboard: write event files too.
      overwrite: forget the checkpoints that are there.

    Returns:
      0, or the number of the signal that stopped the run.
    """
    total = plans.total_steps
    if overwrite and processes.is_first():
        shutil.rmtree(os.path.join(folder, "checkpoints"), ignore_errors=True)
    processes.wait(f"checkpoints of {folder}")
    loop.warm_up(program, plans)
    with checkpoints.opened(folder) as manager, interrupts.caught() as (stop, signals):
        at, state, seen = checkpoints.restore(manager, plans, program.init(seed))
        _save_plans(folder, plans)
        kept = [record for record in done if record["step"] <= at.step]
        if at.step:
            processes.say(f"Goes on from the checkpoint of step {at.step}.")
        saving = loop.Saving(
            due=lambda step: (
                step == total or bool(checkpoint_every and not step % checkpoint_every)
            ),
            save=lambda at, state, seen: checkpoints.save(manager, plans, at, state, seen),
            stop=stop,
        )
        with (
            writers.open_writers(folder, tensorboard=tensorboard, keep=kept) as write,
            _progress(program, plans, at) as show,
        ):

            def on_record(record):
                write(record)
                show(record)

            at, state = loop.train(
                program,
                plans,
                state,
                evaluations=evaluations,
                on_record=on_record,
                at=at,
                before=seen,
                saving=saving,
            )
    if plans.timed:
        _save(folder, "echo_plan", ordering.echo.EchoPlan(list(at.decided), "measured"))
    if at.step < total:
        again = "the same command, without --overwrite," if overwrite else "the same command"
        processes.say(f"Stopped and saved at step {at.step} of {total}: {again} goes on.")
        return signals[0] if signals else signal.SIGTERM  # another process was asked
    checkpoints.export(folder, state.params)
    processes.say(f"Written to {folder}: metrics, plans, checkpoints, model")
    return 0


def _save_plans(folder, plans):
    """Plans that are known before the run; what was measured is one when it has ended."""
    _save(folder, "sync_plan", plans.sync)
    if not plans.timed:
        _save(folder, "echo_plan", plans.echo)
    elif processes.is_first():
        with contextlib.suppress(FileNotFoundError):  # of another policy
            os.remove(os.path.join(folder, "echo_plan.json"))


def _save(folder, name, plan):
    if processes.is_first():
        os.makedirs(folder, exist_ok=True)
        plan.save(os.path.join(folder, f"{name}.json"))


@contextlib.contextmanager
def _progress(program, plans, at):
    """A bar over the steps, and every record in a line above it."""
    sizes = program.sizes
    examples = sizes.workers * sizes.units_per_step * sizes.unit_size
    with processes.bar(total=plans.total_steps, initial=at.step, unit="step") as bar:

        def show(record):
            if not bar.disable:
                bar.write(writers.console_line(record))
            speed = record["step"] * examples / max(record["seconds"], 1e-9)
            loss = f"{record['batch_loss']:.4f}"
            bar.set_postfix(loss=loss, examples_per_s=f"{speed:,.0f}", refresh=False)
            bar.update(record["step"] - bar.n)

        yield show
