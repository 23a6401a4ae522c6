"""Flags that would change nothing are refused, and told who uses them."""

import functools
import importlib

import pytest

from experiments.study import one_run, search
from tests.commands import parsed
from tests.refused import refuses


@pytest.fixture(autouse=True)
def _nothing_is_forecast(monkeypatch):
    for module in (search, one_run):
        monkeypatch.setattr(module, "dry_run", lambda *args: "")


def run(name, *arguments):
    """What `python -m experiments.NAME` does once its flags are parsed."""
    module = importlib.import_module(f"experiments.{name}")
    values = parsed(module, *arguments)
    if hasattr(module, "STUDY"):
        return search.run(module.STUDY, values)
    return (getattr(module, "run", None) if name in ("train", "advise") else module.main)(values)


UNUSED = {
    "train --sync=parallel --h_base=9": "--h_base is 9 and changes nothing: it is for --sync=const",
    "train --sync=constant --growth=3": "--growth is 3.0 and changes nothing: it is for --sync=qsr",
    "train --echo_factor=3": "--echo_factor is 3 .* it is for --echo=fixed",
    "train --echo=diffusion --horizon=3": "--horizon is 3 .* it is for --p. Leave it out",
    "train --schedule=constant --floor=0.1": "--floor is 0.1 .* --schedule=cosine and linear",
    "train --decay_every=3": "--decay_every is 3.0 .* --schedule=step",
    "train --decay_factor=0.3": "--decay_factor is 0.3 .* --schedule=step",
    "train --deal=dealt --bound_every=3": "--bound_every is 3 .* orders of each worker's own",
    "train --average=epoch --ema_epochs=2": "--ema_epochs is .2.0. .* it is for --average=ema",
    "train --target=0.9": "--target is 0.9 .* for echoing and combined",
    "train --metric=loss": "--metric is loss .* for echoing and combined --target",
    "train --learning_rate=1 --learning_rates=1,2": "--learning_rate is 1.0 and --learning_rates",
    "train --epochs=2 --total_steps=9": "--total_steps is 9 and --epochs is 2: pass only one",
    "train --evaluations=2 --evaluate_every=9": "--evaluate_every is 9 and --evaluations is 2",
    "cd_grab --h_base=9": "--h_base is 9 and changes nothing",
    "cd_grab --long --task=hmda": "--long is for --task=digits",
    "qsr --target=0.9": "--target is 0.9 and changes nothing",
    "echoing --echo_factor=3": "--echo_factor is 3 and changes nothing",
    "combined --arms=rr --order=id_pair": "--order is id_pair and is a level of no --arms",
    "cd_grab --arms=rr,qr": "--arms has 'qr'",
    "echoing --task=digits": "has no target",
    "combined --order=rr": "that is the first level",
    "combined --echo=measured": "--echo is measured",
    "forecast --arms=qsr,often": "--arms has .'often'",
    "herding --num_vectors=3": "--workers has 100, and --num_vectors is 3: each worker needs two",
}
# A dry run stands for the command without it; --data_dir and what a folder is for are accepted.
DRY = ("train", "cd_grab", "qsr", "echoing", "combined")
GIVEN = {f"{c} --dry_run" if c.split()[0] in DRY else c: told for c, told in UNUSED.items()}
for flag in ("--gigabits=3", "--device_teraflops=3", "--nocompile"):
    GIVEN[f"train {flag}"] = "changes nothing: it is for --dry_run"
test_a_flag_that_changes_nothing_is_refused = refuses({
    command: (functools.partial(run, *command.split()), told) for command, told in GIVEN.items()
})  # fmt: skip


@pytest.mark.parametrize("command", [
    "cd_grab --arms=rr+constant --h_base=9", "qsr --arms=parallel --growth=3", "qsr --floor=0.001",
    "qsr --schedule=step --floor=0.1 --decay_every=3", "qsr --epochs=2 --total_steps=200",
    "cd_grab --task=hmda --data_dir=DIR", "train --sync=parallel --h_base=4 --bound_every=0",
    "combined --arms=rr+constant", "combined --target=0.1 --metric=loss", "train --h_base=9",
    "train --average=ema --ema_epochs=2",
    "train --output_dir=x --track=wandb --checkpoint_every=3 --overwrite",
])  # fmt: skip
def test_what_a_preset_may_give_and_another_flag_override_is_accepted(command):
    run(*command.split(), "--dry_run")
