"""Presets: what their files say, what they would cost, and that the small ones run to the end."""

import functools
import os
import pathlib
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from absl import flags
from absl.testing import flagsaver

from experiments import cd_grab, echoing, qsr, records, task_flags, tasks
from experiments.flops import operations
from experiments.sync_recipes import setting_of
from experiments.sync_rules import RULES
from experiments.tasks import TASKS

ROOT = pathlib.Path(__file__).resolve().parents[1]
DATA = ROOT.parent / "shared" / "data"
FOLDER = pathlib.Path("experiments/presets")
ENTRYPOINTS = {"cd_grab": cd_grab, "qsr": qsr, "echoing": echoing}
LARGE = {"resnet152": 60_192_808, "vit_b": 86_567_656}
GPT2 = 50_257 * 128 + 128 * 128 + 2 * (12 * 128**2 + 13 * 128) + 2 * 128  # two blocks, tied
# Parameters of the published network, and examples per step; None: not known.
PUBLISHED = {
    "cd_grab_hmda": (20, 16),
    "cd_grab_wikitext2_lstm": (33_278 * 32 + 2 * (2 * 32 * 128 + 2 * 128), 16),
    "cd_grab_m4": (21 * 64 + 2 * 65 * 64 + 65 * 6, 16),
    "cd_grab_wikitext103_gpt2": (GPT2, 64),
    **{f"cd_grab_lenet_cifar10_w{w}": (62_006, 64) for w in (4, 8, 16, 32, 64, "64_lr")},
    "cd_grab_sst2_head": (2 * 769, None),
    **{f"qsr_{net}_{b}{shape}": (number, b) for net, number in LARGE.items()
       for b in (4096, 16384) for shape in ("", "_linear", "_step")},
    **{f"echoing_cifar{c}_{net}": (at_ten + (c - 10) * (width + 1), None) for c in (10, 100)
       for net, at_ten, width in (("resnet18", 11_173_962, 512),
                                  ("mobilenet_v2", 2_236_682, 1280))},
    "echoing_wikitext2_gpt2": (GPT2 + (33_278 - 50_257) * 128, None),
}  # fmt: skip
NAMES = sorted(PUBLISHED)
PATHS = [FOLDER / f"{n}.flags" for n in NAMES] + [FOLDER / "tiny" / f"{n}.flags" for n in NAMES]
QSR = [name for name in NAMES if name.startswith("qsr")]
DATA_FOLDERS = {
    "hmda": "hmda", "wikitext2_small": "wikitext2", "m4_weekly": "m4", "sst2": "sst2",
    "cifar10_small": "tfds", "cifar10_resnet": "tfds", "cifar10_vit": "tfds",
    "cifar10_mobilenet": "tfds", "shakespeare": "tinyshakespeare",
}  # fmt: skip


@pytest.fixture(autouse=True)
def _at_the_root(monkeypatch):
    """Where commands of presets are given: flagfiles name each other from there."""
    monkeypatch.chdir(ROOT)


def entrypoint(path):
    return next(e for e in ENTRYPOINTS if pathlib.Path(path).stem.startswith(f"{e}_"))


def parsed(path):
    values = flags.FlagValues()
    ENTRYPOINTS[entrypoint(path)].define_flags(values)
    rest = values(["experiment", f"--flagfile={path}"])
    assert rest == ["experiment"], "every line of the body is a flag"
    return values


@functools.cache
def abstract(name, model):
    return TASKS[name](model=model, abstract=True)


def recipe_of(values):
    if "task" not in values:
        return (qsr if "rules" in values else echoing).recipe_from_flags(values)
    return task_flags.recipe_from_flags(abstract(values.task, values.model), values)


def parts(path):
    """The comment, without its marks, and the flags."""
    comment, body = pathlib.Path(path).read_text().split("\n\n")
    assert all(line.startswith("#") for line in comment.split("\n"))
    return [line[2:] for line in comment.split("\n")], body.rstrip("\n").split("\n")


def shown_parameters(text):
    return int(re.search(r"\| parameters +\| ([\d,]+)", text)[1].replace(",", ""))


def test_every_preset_has_a_tiny_variant_and_a_line_in_the_readme():
    for folder in (FOLDER, FOLDER / "tiny"):
        assert sorted(path.stem for path in folder.glob("*.flags")) == NAMES
    listed = re.findall(r"^\| `(\w+)`", (FOLDER / "README.md").read_text(), re.M)
    assert sorted(listed) == NAMES


@pytest.mark.parametrize("path", PATHS, ids=str)
def test_the_comment_says_the_commands_and_what_to_expect(path):
    comment, body = parts(path)
    start = f"  python -m experiments.{entrypoint(path)} --flagfile={path}"
    assert comment[comment.index("Command:") + 1] == f"{start} --data_dir=DIR"
    assert comment[comment.index("Dry run:") + 1] == f"{start} --dry_run"
    tiny = path.parent.name == "tiny"
    for head in ("Replaced",) if tiny else ("Published", "Hardware", "Deviations"):
        assert any(re.match(rf"{head}: \S", line) for line in comment), head
    if tiny:
        assert body[0] == f"--flagfile={FOLDER / path.name}"
    chosen = {re.match(r"--(?:no)?(\w+)", line)[1] for line in body}
    assert not chosen & {"data_dir", "output_dir", "overwrite", "dry_run"}, "those are the user's"


@pytest.mark.parametrize("name", NAMES)
def test_a_preset_is_the_record_of_its_recipe(name):
    """Nothing that matters is left to a default; its tiny variant is a part of it."""
    values, tiny = parsed(FOLDER / f"{name}.flags"), parsed(FOLDER / "tiny" / f"{name}.flags")
    recipe, small = recipe_of(values), recipe_of(tiny)
    fields = {field for field in recipe._fields if field in values}
    if "schedule" not in values or values.schedule != "step":
        fields -= {"decay_steps", "decay_every", "decay_factor"}
    assert {field for field in fields if values[field].value is None} == set()
    for length in {"epochs", "total_steps", "workers", "batch_size"} & fields:
        assert getattr(small, length) <= getattr(recipe, length)
    for values_of_one in ("orders", "rules", "arms"):
        if values_of_one in values:
            assert set(tiny[values_of_one].value) <= set(values[values_of_one].value)
    assert tiny.seeds <= values.seeds


@pytest.mark.parametrize("name", [n for n in NAMES if PUBLISHED[n][1]])
def test_a_step_takes_as_many_examples_as_published(name):
    recipe, expected = recipe_of(parsed(FOLDER / f"{name}.flags")), PUBLISHED[name][1]
    if entrypoint(name) == "qsr":
        assert recipe.workers * recipe.batch_size == expected
        assert recipe.total_steps / (1_281_167 // expected) in (200, 300)  # epochs
    else:
        assert recipe.workers * recipe.units_per_step * recipe.unit_size == expected


@functools.cache
def plan_of(name):
    values = parsed(FOLDER / f"{name}.flags")
    return RULES["qsr"].plan(setting_of(recipe_of(values), values.h_max))


@pytest.mark.parametrize(
    "name, rounds, volume, last",
    [
        ("qsr_vit_b_4096", 9711, "10.375%", (85_458, 8142)),
        ("qsr_resnet152_4096", 24_792, "39.731%", (61_571, 829)),
    ],
)
def test_qsr_has_the_published_rounds(name, rounds, volume, last):
    plan = plan_of(name)
    assert (plan.rounds, f"{plan.volume:.3%}") == (rounds, volume)
    assert (plan.starts[-1], plan.periods[-1]) == last


@pytest.mark.parametrize("name", QSR)
def test_qsr_plans_of_other_batches_and_decays_are_near_the_published_ones(name):
    """A quarter of the steps at four times the batch, and decays that reach the floor as well."""
    plan, base = plan_of(name), plan_of(re.sub("(4096|16384).*", "4096", name))
    shape = name.rsplit("_", 1)[1]
    if shape.isdigit():
        assert plan.volume == pytest.approx(base.volume, rel=2e-3)
    else:
        assert base.volume / 2 < plan.volume < 1.2 * base.volume
        assert plan.periods.max() > 4 * plan.periods.min()


SLOW = (*LARGE, "mobilenet_v2")


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[pytest.mark.slow] * any(net in n for net in SLOW)) for n in NAMES],
)
def test_the_network_has_as_many_parameters_as_published(name):
    values = parsed(FOLDER / f"{name}.flags")
    if "task" in values:
        task = abstract(values.task, values.model)
    else:
        task = recipe_of(values).load(None, abstract=True)
    params = jax.eval_shape(task.model.init, jax.random.key(0))
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) == PUBLISHED[name][0]


def dry_run(capsys, command):
    module = ENTRYPOINTS[command[0]]
    with flagsaver.flagsaver():
        module.define_flags()
        flags.FLAGS([*command, "--dry_run"])
        module.main([])
    return capsys.readouterr().out


def test_a_dry_run_of_orders(capsys):
    path = FOLDER / "tiny" / "cd_grab_hmda.flags"
    command = ["cd_grab", f"--flagfile={path}", "--orders=rr,cd_grab", "--nocompile"]
    text = dry_run(capsys, command)
    assert shown_parameters(text) == 20
    assert re.search(r"\| training examples +\| 16,384 ", text), "--num_train counts"
    # 16,384 examples of four workers, four per step and worker, three epochs.
    for label in ("D-RR", "CD-GraB"):
        assert re.search(rf"\| {label} +\| 1024 +\| 3072 +\| \S+ k?B +\| not compiled", text), label


def test_a_dry_run_of_rules(capsys):
    path = FOLDER / "tiny" / "qsr_vit_b_4096.flags"
    command = ["qsr", f"--flagfile={path}", "--recipe=digits", "--rules=parallel,qsr"]
    text = dry_run(capsys, [*command, "--nocompile"])
    rounds = RULES["qsr"].plan(setting_of(recipe_of(parsed(path)))).rounds
    assert re.search(rf"\| QSR +\| {rounds} +\| {rounds / 40:.3%} +\|", text)
    assert re.search(r"\| parallel +\| 40 +\| 100.000% +\| 1 to 1 +\| \S+ .B +\|", text)
    assert text.count("not compiled") == 2


def test_a_dry_run_of_arms(capsys):
    path = FOLDER / "tiny" / "echoing_wikitext2_gpt2.flags"
    command = ["echoing", f"--flagfile={path}", "--recipe=digits"]
    text = dry_run(capsys, [*command, "--arms=none,diffusion,proximal"])
    # R = 4, so e = 4 and twice the steps; one load in four steps.
    row = r"\| 4 \| {} +\| 120 +\| {} +\| {} +\| {}% +\| \S+ .B +\| (\S+) MB +\|"
    assert re.search(row.format("no echo", 120, 120, "100.0"), text)
    echo = re.search(row.format("error diffusion", 30, 30, "25.0"), text)
    proximal = re.search(row.format("fixed factor, proximal", 30, 30, "25.0"), text)
    more = float(proximal[1]) - float(echo[1])
    # The parameters at the load: those of 64 x 512 x 512 x 10 units, in float32.
    anchor = 4e-6 * (65 * 512 + 513 * 512 + 513 * 10)
    assert more == pytest.approx(anchor, abs=0.1)


def test_the_first_examples_alone_train():
    task = TASKS["digits"]()
    assert tasks.base.with_first(task, None) is task
    few = tasks.base.with_first(task, 100)
    assert few.train["x"].shape == (100, 64) and few.test is task.test
    assert (few.train["y"] == task.train["y"][:100]).all()
    assert few.optimum is None, "that of all examples is another"


def test_loops_count_as_often_as_they_turn():
    def twice(x):
        return jax.lax.scan(lambda x, _: (x @ x, None), x, length=2)[0]

    def nested(x):
        return jax.lax.scan(lambda x, _: (twice(x), None), x, length=5)[0]

    x = jnp.ones((50, 50))
    # 250,000 operations each, and a few for the loops' counters.
    assert operations(lambda x: x @ x, x) == 250_000
    assert operations(jax.jit(twice), x) == pytest.approx(2 * 250_000, abs=100)
    assert operations(nested, x) == pytest.approx(10 * 250_000, abs=100)


def run(path, *more, timeout):
    command = [sys.executable, "-m", f"experiments.{entrypoint(path)}", f"--flagfile={path}", *more]
    clean = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}  # of this test process
    done = subprocess.run(
        command, env=clean | {"JAX_PLATFORMS": "cpu"}, cwd=ROOT, capture_output=True, text=True,
        timeout=timeout,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_dry_run_at_full_size(name):
    text = run(FOLDER / f"{name}.flags", "--dry_run", timeout=900)
    assert shown_parameters(text) == PUBLISHED[name][0]
    assert "forecast" in text and re.search(r"\| \S+ [MG]B +\|", text)
    if name.startswith("qsr"):
        assert re.search(rf"\| QSR +\| {plan_of(name).rounds} +\|", text)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_tiny_variant_runs_to_its_end(name, tmp_path):
    path = FOLDER / "tiny" / f"{name}.flags"
    values = parsed(path)
    folder = DATA / DATA_FOLDERS[values.task if "task" in values else values.recipe]
    if not folder.exists():
        pytest.skip(f"no data in ../shared/data/{folder.name}")
    if folder.name == "tfds":
        pytest.importorskip("tensorflow_datasets")
    text = run(path, f"--data_dir={folder}", f"--output_dir={tmp_path}", timeout=300)
    found = records.read(str(tmp_path / "metrics.jsonl"))
    assert found and not any(record.get("diverged") for record in found)
    assert (tmp_path / "table.md").read_text().strip() in text
    assert all(picture.stat().st_size > 10_000 for picture in tmp_path.glob("*.png"))
    assert list(tmp_path.glob("*.png"))
