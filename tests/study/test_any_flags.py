"""Any flags give the requested plans, or an error that names one of them."""

import re

import numpy as np
from absl import flags as absl_flags
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments import train
from experiments.study import flags
from experiments.study.arms import OPTIONS, TABLES, arm_from_flags, plans_of
from experiments.tasks.base import check_recipe
from experiments.training import config, measure, timeline
from tests.cases import times
from tests.commands import parsed
from tests.words import each

WHOLE = st.one_of(st.integers(-1, 12), st.sampled_from([40, 2000, 10**12, -(10**9)]))
REAL = st.one_of(
    st.floats(0, 2), st.floats(), st.sampled_from([0.0, -1.0, 1.0, 1e-300, 1e300, np.inf, np.nan])
)
ANY = {
    "workers": WHOLE, "units_per_step": WHOLE, "unit_size": WHOLE, "num_train": WHOLE,
    "total_steps": WHOLE, "epochs": st.integers(-1, 30), "warmup_steps": WHOLE,
    "h_base": WHOLE, "echo_factor": WHOLE, "horizon": WHOLE,
    "evaluations": WHOLE, "evaluate_every": WHOLE, "bound_every": WHOLE, "seed": WHOLE,
    "growth": REAL, "floor": REAL, "decay_every": REAL, "decay_factor": REAL, "momentum": REAL,
    "weight_decay": REAL, "learning_rate": REAL,
    **{kind: st.sampled_from([*table, *each(kind), "cats"]) for kind, table in TABLES.items()},
    **{flag: WHOLE if isinstance(option.words, str) else st.sampled_from([*option.words, "cats"])
       for flag, option in OPTIONS.items()},
    "ema_epochs": REAL, "average": st.sampled_from(["epoch", "ema,epoch", "", "cats"]),
    "schedule": st.sampled_from(["constant", "cosine", "linear", "step", "cats"]),
    "task": st.sampled_from(["digits", "digits_cosine", "digits_mlp", "hmda", "cats"]),
}  # fmt: skip


def decided(arguments):
    """What `train` decides before anything is compiled: sizes, plans, evaluations, segments."""
    values = parsed(train, "--dry_run", *arguments)
    task, recipe = flags.setting_from_flags(values)
    rates = recipe.learning_rates
    rate = rates[0] if values.learning_rate is None else values.learning_rate
    recipe = recipe._replace(learning_rates=(rate,))
    check_recipe(recipe)
    arm = arm_from_flags(values)
    sizes = config.sizes_of(task, recipe, deals=arm.rows[0].deals)
    plans = plans_of(task, recipe, arm, rate=rate, seed=values.seed)
    plans.check()
    return sizes, plans, measure.evaluation_steps(recipe, sizes, plans.total_steps)


# What little data are called.
ALSO = dict.fromkeys(("num_train", "unit_size"), ("training_set",))


def names(message, name):
    """Whether a message names a flag, or the field or argument that it sets."""
    plain = re.sub(r"[\s-]+", "_", message.lower())
    return any(said in plain for said in (name, name.removesuffix("s"), *ALSO.get(name, ())))


@settings(max_examples=times(60))
@given(
    st.dictionaries(st.sampled_from([*ANY]), st.none(), min_size=1, max_size=6).flatmap(
        lambda chosen: st.fixed_dictionaries({name: ANY[name] for name in chosen})
    )
)
def test_any_flags_give_plans_or_an_error_that_names_one_of_them(chosen):
    arguments = [f"--{name}={value}" for name, value in chosen.items()]
    try:
        sizes, plans, evaluated = decided(arguments)
    except (ValueError, absl_flags.Error) as error:
        assert any(names(str(error), name) for name in chosen), (arguments, str(error))
        return
    total = plans.total_steps
    assert sizes.workers >= 1 and 1 <= sizes.units_per_step <= sizes.num_units
    assert plans.rates.shape == (total,) and np.isfinite(plans.rates).all()
    assert evaluated[-1] == total and 0 <= evaluated[0] and len(set(evaluated)) == len(evaluated)
    if not plans.echo.online:
        ends = timeline.timeline(plans, sizes).ends
        assert ends[-1] == total and (np.diff(ends, prepend=0) > 0).all()
