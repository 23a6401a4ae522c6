"""Presets: their files, their plans, and that `--tiny` makes runs of them."""

import functools
import os
import pathlib
import re
import subprocess
import sys

import pytest

from experiments import cd_grab, echoing, qsr, slowrun
from experiments.compare import commands, flags, tiny
from experiments.compare.arms import arms_of
from experiments.data.base import size_of
from experiments.report import records
from experiments.trainer import config
from tests.commands import parsed as parsed_flags

ROOT = pathlib.Path(__file__).resolve().parents[2]
DATA = ROOT.parent / "shared" / "data"
FOLDER = pathlib.Path("experiments/presets")
ENTRYPOINTS = {"cd_grab": cd_grab, "qsr": qsr, "echoing": echoing, "slowrun": slowrun}
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
    **{f"qsr_{net}_{b}": (number, b) for net, number in LARGE.items() for b in (4096, 16384)},
    "echoing_cifar10_resnet18": (11_173_962, None),
    # 16 blocks of width 1024.
    "slowrun_fineweb": (
        (50_257 + 2048 + 2) * 1024 + 16 * (12 * 1024**2 + 13 * 1024),
        2**19 // 2048,
    ),
}
NAMES = sorted(PUBLISHED)
DATA_FOLDERS = {  # of tasks
    "hmda": "hmda",
    "wikitext2_small": "wikitext2",
    "m4_weekly": "m4",
    "sst2": "sst2",
    "cifar10": "tfds",
}


@pytest.fixture(autouse=True)
def _at_the_root(monkeypatch):
    """The folder of presets' commands, from which flagfiles name each other."""
    monkeypatch.chdir(ROOT)


def entrypoint(path):
    return next(e for e in ENTRYPOINTS if pathlib.Path(path).stem.startswith(f"{e}_"))


def parsed(path, *more):
    module = ENTRYPOINTS[entrypoint(path)]
    return parsed_flags(module, f"--flagfile={path}", "--dry_run", *more)


@functools.cache
def setting_of(path, *more):
    """The abstract task of a preset, and its recipe."""
    return flags.setting_from_flags(parsed(path, *more))


def test_every_preset_has_a_line_in_the_readme():
    assert sorted(path.stem for path in FOLDER.rglob("*.flags")) == NAMES
    listed = re.findall(r"^\| `(\w+)` +\|", (FOLDER / "README.md").read_text(), re.M)
    assert sorted(listed) == NAMES


def test_the_comments_have_expected_results():
    for path in FOLDER.glob("*.flags"):
        comment, body = path.read_text().split("\n\n")
        heads = ("Published", "Hardware", "Deviations")
        assert all(re.search(rf"^# {head}: \S", comment, re.M) for head in heads), path
        assert not re.search("^--(data_dir|output_dir|overwrite|dry_run)", body, re.M), "the user's"


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[pytest.mark.slow] * any(net in n for net in LARGE)) for n in NAMES],
)
def test_a_preset_has_the_published_network_and_batch_and_tiny_makes_it_small(name):
    path = FOLDER / f"{name}.flags"
    (task, recipe), (parameters, examples) = setting_of(path), PUBLISHED[name]
    assert config.num_params(task.model) == parameters
    if examples:
        assert recipe.workers * recipe.units_per_step * recipe.unit_size == examples
    arms = parsed(path).arms or [*ENTRYPOINTS[entrypoint(name)].STUDY.arms]
    assert set(arms) == set(arms_of(arms, ENTRYPOINTS[entrypoint(name)].STUDY.arms))
    small_task, small = setting_of(path, "--tiny")
    assert size_of(small_task.train) == 512
    assert config.num_params(small_task.model) <= max(10**6, parameters)
    assert small.workers * small.units_per_step * small.unit_size <= 64
    sizes = config.sizes_of(small_task, small)
    steps = config.total_steps_of(small, sizes)
    assert steps <= 4 * max(10, sizes.loads_per_epoch)
    shares = {(s.workers, s.schedule, s.optimizer, s.h_base, s.growth) for s in (recipe, small)}
    assert small.run == ("turns" if name.startswith(("qsr", "echoing")) else "vmap")
    assert len(shares) == 1 and small.warmup_steps <= steps / 4 and len(small.learning_rates) == 1


@pytest.mark.parametrize(
    "task,parameters",
    [
        ("cifar100_resnet18", 11_173_962 + 90 * 513),
        pytest.param("cifar10_mobilenet_v2", 2_236_682, marks=pytest.mark.slow),
        pytest.param("cifar100_mobilenet_v2", 2_236_682 + 90 * 1281, marks=pytest.mark.slow),
        ("wikitext2_gpt2", GPT2 + (33_278 - 50_257) * 128),
    ],
)
def test_a_flag_after_a_preset_gives_the_other_networks_of_echoing(task, parameters):
    path = FOLDER / "echoing_cifar10_resnet18.flags"
    other, _ = setting_of(path, f"--task={task}")
    assert config.num_params(other.model) == parameters
    assert f"{task}`" in (FOLDER / "README.md").read_text()


@functools.cache
def plan_of(name, *more):
    task, recipe = setting_of(FOLDER / f"{name}.flags", *more)
    return commands.sync_plans({"qsr": qsr.STUDY.arms["qsr"]}, task, recipe)["qsr"]


PUBLISHED_ROUNDS = {"qsr_vit_b_4096": 9711, "qsr_resnet152_4096": 24_792}
EPOCHS = {"vit_b": 100, "resnet152": 60}  # of a step decay
DECAYS = {
    net: {
        "cosine": (),
        "linear": ("--schedule=linear",),
        "step": ("--schedule=step", f"--decay_every={epochs}"),
    }
    for net, epochs in EPOCHS.items()
}


@pytest.mark.parametrize("decay", ["cosine", "linear", "step"])
@pytest.mark.parametrize("name", [name for name in NAMES if name.startswith("qsr")])
def test_qsr_plans_of_other_batches_and_decays_are_near_the_published_ones(name, decay):
    """A quarter of the steps at four times the batch; all decays reach the floor."""
    net, examples = name.removeprefix("qsr_").rsplit("_", 1)[0], PUBLISHED[name][1]
    more = DECAYS[net][decay]
    task, recipe = setting_of(FOLDER / f"{name}.flags", *more)
    sizes = config.sizes_of(task, recipe, deals="examples")
    assert sizes.loads_per_epoch == 1_281_167 // examples
    assert config.total_steps_of(recipe, sizes) / sizes.loads_per_epoch in (200, 300)  # epochs
    plan, base = plan_of(name, *more), plan_of(f"qsr_{net}_4096")
    volume, volume_of_base = (p.rounds / p.total_steps for p in (plan, base))
    if decay == "cosine":
        assert plan.rounds == PUBLISHED_ROUNDS.get(name, plan.rounds)
        assert volume == pytest.approx(volume_of_base, rel=2e-3)
    else:
        assert volume_of_base / 2 < volume < 1.2 * volume_of_base
        assert plan.periods.max() > 4 * plan.periods.min()
    if decay == "step":  # falls after as many steps as it did
        first = EPOCHS[net] * sizes.loads_per_epoch
        rates = config.config_of(recipe, sizes, seed=0).rates
        assert rates[first - 1] == 1 and rates[first] == pytest.approx(0.1)


def run(path, *more, timeout):
    command = [sys.executable, "-m", f"experiments.{entrypoint(path)}", f"--flagfile={path}", *more]
    clean = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}  # of this test process
    done = subprocess.run(
        command,
        env=clean | {"JAX_PLATFORMS": "cpu"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


ARMS = {
    "cd_grab": "rr,cd_grab",
    "qsr": "parallel,qsr",
    "echoing": "none,diffusion,measured",
    "slowrun": "rr+documents,cd_grab+sketch1024+shifted",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_tiny_run_of_a_preset_ends(name, tmp_path):
    path = FOLDER / f"{name}.flags"
    small, _ = tiny.stand_in(parsed(path).task, **flags.given(parsed(path), flags.choices()))
    folder = DATA / DATA_FOLDERS[small]
    if not folder.exists():
        pytest.skip(f"no data in ../shared/data/{folder.name}")
    if folder.name == "tfds":
        pytest.importorskip("tensorflow_datasets")
    arms = f"--arms={ARMS[entrypoint(path)]}"
    text = run(
        path, "--tiny", arms, f"--data_dir={folder}", f"--output_dir={tmp_path}", timeout=300
    )
    recorded = records.read(str(tmp_path / "metrics.jsonl"))
    assert recorded and not any(record.get("diverged") for record in recorded)
    assert (tmp_path / "table.md").read_text().strip() in text
    assert all(picture.stat().st_size > 10_000 for picture in tmp_path.glob("*.png"))
    assert list(tmp_path.glob("*.png"))
