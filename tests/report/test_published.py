"""Every published table equals that of its recorded runs, character by character."""

import importlib
import pathlib
import re
import shlex

import pytest

from docs import shards
from experiments import combined, echo_theory, echoing, one_plan, order_rates, scored, slowrun
from experiments.compare import cost
from experiments.compare.arms import arms_of
from experiments.report import archive, tables
from tests import commands

ROOT = pathlib.Path(__file__).parents[2]


def page(name):
    return (ROOT / "docs" / "results" / name).read_text(encoding="utf-8")


def check(text, whole):
    lines = whole.splitlines()
    lost = [line for line in text.splitlines() if line not in lines]
    assert not lost, "\n".join(lost)
    assert text in whole


def _name(path):
    return path.parent.name


def check_commands(name, whole):
    """The page links to them."""
    assert f"../../experiments/runs/{name}/{archive.COMMAND}" in whole
    assert archive.commands(archive.FOLDER / name)


@pytest.mark.parametrize("name", ["digits", "digits_constant", "shakespeare"])
def test_the_factorials(name):
    comparison, whole = archive.load(f"combined_{name}"), page("combined.md")
    assert len(comparison.chosen) == 8
    check(tables.target_line(comparison), whole)
    check(combined.effects_table(comparison)[1], whole)
    if name in ("digits", "shakespeare"):
        check(tables.table(comparison, combined.STUDY.columns), whole)
    if name == "digits":
        check(combined.modelled_table(comparison, cost.machines(4.0, 2.0))[1], whole)
    check_commands(f"combined_{name}", whole)


def test_many_epochs_over_little_text():
    whole = page("slowrun.md")
    check(tables.table(archive.load("slowrun"), slowrun.COLUMNS), whole)
    check_commands("slowrun", whole)


def test_orders_by_scores():
    whole, names = (
        page("scored.md"),
        {"constant": "constant", "moderate": "to 0.3", "linear": "to 0"},
    )
    comparisons = {label: archive.load(f"scored_{name}") for name, label in names.items()}
    check(scored.summary(comparisons), whole)
    for name in names:
        check_commands(f"scored_{name}", whole)


@pytest.mark.parametrize("name", ["shakespeare_adamw", "vit_adamw", "gpt2_sketches"])
def test_orders_of_models_of_text_and_images(name):
    whole = page("orders.md")
    check(tables.gains(archive.load(name)), whole)
    check_commands(name, whole)


@pytest.mark.parametrize("name", ["vit", "resnet"])
def test_the_rules_of_local_steps(name):
    comparison, whole = archive.load(f"qsr_cifar10_{name}"), page("local_steps.md")
    check(tables.table(comparison, tables.SYNC_COLUMNS), whole)
    check(tables.baseline_differences(comparison), whole)


@pytest.mark.parametrize("name", ["outer_vit", "outer_gpt", "outer_vit_muon", "outer_gpt_muon"])
def test_outer_momentum_fragments_and_muon(name):
    comparison, whole = archive.load(name), page("outer.md")
    check(tables.table(comparison, tables.SYNC_COLUMNS), whole)
    check_commands(name, whole)


@pytest.mark.parametrize("name", ["resnet", "mobilenet", "shakespeare"])
def test_the_arms_of_slow_input(name):
    comparison, whole = archive.load(f"echo_{name}"), page("echoing.md")
    assert comparison.speeds == (2, 8)
    for speed in comparison.speeds:
        check(tables.table(comparison, echoing.COLUMNS, speed), whole)


@pytest.mark.parametrize("task", ["digits", "shakespeare", "resnet"])
def test_coins_for_loads_and_syncs(task):
    name, whole = f"algorithm2_{task}", page("algorithm2.md")
    check(tables.table(archive.load(name), echoing.COUNTS, 4), whole)
    check_commands(name, whole)


def test_uses_of_one_plan():
    for name in ("one_plan_digits", "one_plan_gpt", "one_plan_vit"):
        whole = page("one_plan.md" if name == "one_plan_digits" else "one_plan_networks.md")
        check(one_plan.table(archive.load(name)), whole)
        check_commands(name, whole)


def test_alpha_and_switches():
    whole = page("alpha.md")
    check(one_plan.table(archive.load("alpha_digits")), whole)
    check_commands("alpha_digits", whole)


@pytest.mark.parametrize("study", shards.STUDIES)
def test_unequal_shards(study):
    whole = page("unequal_shards.md")
    check(shards.values_table(study), whole)
    check(shards.effects_table(study), whole)
    for kind in shards.KINDS:
        check_commands(f"shards_{study}_{kind}", whole)


@pytest.mark.parametrize("name", ["order_rates", "echo_theory"])
def test_exponents_of_theory(name):
    rows, whole = archive.rows_of(archive.FOLDER / name), page(f"{name}.md")
    made = order_rates.slope_tables if name == "order_rates" else echo_theory.trained_tables
    for text in made(rows).values():
        check(text, whole)
    check_commands(name, whole)


@pytest.mark.slow
def test_exponents_of_a_quadratic():
    for text in echo_theory.exact_tables().values():
        check(text, page("echo_theory.md"))


@pytest.mark.parametrize("path", sorted(archive.FOLDER.glob("*/command.txt")), ids=_name)
def test_the_commands_of_a_record_exist_or_name_their_commit_and_have_its_seeds(path):
    lines = archive.commands(path.parent)
    for line in (line for line in lines if not re.search("  # at commits? [0-9a-f]{7,8}", line)):
        _, _, name, *arguments = shlex.split(line.replace("--data_dir=DIR", ""))
        module = importlib.import_module(name)
        if not hasattr(module, "STUDY"):  # a sweep, which has no arms
            continue
        asked = commands.parsed(module, *arguments).arms or [*module.STUDY.arms]
        assert [*arms_of(asked, module.STUDY.arms, **module.STUDY.usual)]
    seeds = 1 + max(row["seed"] for row in archive.rows_of(path.parent))
    named = [int(n) for line in lines for n in re.findall(r"(?<=--seeds=)\d+|\d+(?= seeds)", line)]
    assert seeds in named or seeds <= 5 and len(named) < len(lines)  # of a study's own default
