"""Presets: their files, their cost, and that the tiny ones run."""

import functools
import os
import pathlib
import re
import subprocess
import sys

import pytest

from experiments import cd_grab, echoing, qsr, slowrun
from experiments.compare import flags, recipes, search, study
from experiments.report import records
from experiments.trainer import config
from tests import commands

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
    **{f"qsr_{net}_{b}{shape}": (number, b) for net, number in LARGE.items()
       for b in (4096, 16384) for shape in ("", "_linear", "_step")},
    **{f"echoing_cifar{c}_{net}": (at_ten + (c - 10) * (width + 1), None) for c in (10, 100)
       for net, at_ten, width in (("resnet18", 11_173_962, 512),
                                  ("mobilenet_v2", 2_236_682, 1280))},
    "echoing_wikitext2_gpt2": (GPT2 + (33_278 - 50_257) * 128, None),
    # 16 blocks of width 1024.
    "slowrun_fineweb": (
        (50_257 + 2048 + 2) * 1024 + 16 * (12 * 1024**2 + 13 * 1024), 2**19 // 2048
    ),
}  # fmt: skip
NAMES = sorted(PUBLISHED)
FOLDERS = (FOLDER, FOLDER / "tiny")
SLOW = (*LARGE, "mobilenet_v2")
DATA_FOLDERS = {  # of tasks
    "hmda": "hmda", "wikitext2_small": "wikitext2", "m4_weekly": "m4", "sst2": "sst2",
    "cifar10_small": "tfds", "cifar10": "tfds", "tinyshakespeare": "tinyshakespeare",
}  # fmt: skip


@pytest.fixture(autouse=True)
def _at_the_root(monkeypatch):
    """The folder of presets' commands, from which flagfiles name each other."""
    monkeypatch.chdir(ROOT)


def entrypoint(path):
    return next(e for e in ENTRYPOINTS if pathlib.Path(path).stem.startswith(f"{e}_"))


def parsed(path, *more):
    module = ENTRYPOINTS[entrypoint(path)]
    return commands.parsed(module, f"--flagfile={path}", "--dry_run", *more)


@functools.cache
def setting_of(path):
    """The abstract task of a preset, and its recipe."""
    return flags.setting_from_flags(parsed(path))


def full(name):
    return setting_of(FOLDER / f"{name}.flags")


def test_every_preset_has_a_tiny_variant_and_a_line_in_the_readme():
    for folder in FOLDERS:
        assert sorted(path.stem for path in folder.glob("*.flags")) == NAMES
    listed = re.findall(r"^\| `(\w+)`", (FOLDER / "README.md").read_text(), re.M)
    assert sorted(listed) == NAMES


@pytest.mark.parametrize(
    "folder,heads", [(FOLDER, ("Published", "Hardware", "Deviations")), (FOLDERS[1], ("Replaced",))]
)
def test_the_comments_have_expected_results(folder, heads):
    for path in folder.glob("*.flags"):
        comment, body = path.read_text().split("\n\n")
        assert all(re.search(rf"^# {head}: \S", comment, re.M) for head in heads), path
        if folder.name == "tiny":
            assert body.startswith(f"--flagfile={FOLDER / path.name}\n")
        assert not re.search("^--(data_dir|output_dir|overwrite|dry_run)", body, re.M), "the user's"


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[pytest.mark.slow] * any(net in n for net in SLOW)) for n in NAMES],
)
def test_a_preset_has_the_published_network_and_batch_and_a_smaller_tiny_variant(name):
    (task, recipe), (parameters, examples) = full(name), PUBLISHED[name]
    assert config.num_params(task.model) == parameters
    if examples:
        assert recipe.workers * recipe.units_per_step * recipe.unit_size == examples
    values, tiny = (parsed(folder / f"{name}.flags") for folder in FOLDERS)
    of = ENTRYPOINTS[entrypoint(name)].STUDY
    arms = values.arms or [*of.arms]
    assert set(tiny.arms) <= set(arms) == set(study.arms_of(of, arms))
    assert tiny.seeds <= values.seeds
    small_task, small = setting_of(FOLDER / "tiny" / f"{name}.flags")
    assert small.workers <= recipe.workers
    assert config.size_of(small_task.train) <= 20_000


@functools.cache
def plan_of(name):
    task, recipe = full(name)
    return search.sync_plans({"qsr": qsr.STUDY.arms["qsr"]}, task, recipe)["qsr"]


PUBLISHED_ROUNDS = {"qsr_vit_b_4096": 9711, "qsr_resnet152_4096": 24_792}


@pytest.mark.parametrize("name", [name for name in NAMES if name.startswith("qsr")])
def test_qsr_plans_of_other_batches_and_decays_are_near_the_published_ones(name):
    """A quarter of the steps at four times the batch; all decays reach the floor."""
    (task, recipe), examples = full(name), PUBLISHED[name][1]
    sizes = config.sizes_of(task, recipe, deals="examples")
    assert sizes.loads_per_epoch == 1_281_167 // examples
    assert config.total_steps_of(recipe, sizes) / sizes.loads_per_epoch in (200, 300)  # epochs
    plan, base = plan_of(name), plan_of(re.sub("(4096|16384).*", "4096", name))
    volume, volume_of_base = (p.rounds / p.total_steps for p in (plan, base))
    shape = name.rsplit("_", 1)[1]
    if shape.isdigit():
        assert plan.rounds == PUBLISHED_ROUNDS.get(name, plan.rounds)
        assert volume == pytest.approx(volume_of_base, rel=2e-3)
    else:
        assert volume_of_base / 2 < volume < 1.2 * volume_of_base
        assert plan.periods.max() > 4 * plan.periods.min()
    if shape == "step":  # falls after as many steps as it did
        first = (100 if "vit" in name else 60) * sizes.loads_per_epoch
        rates = config.config_of(recipe, sizes, seed=0).rates
        assert rates[first - 1] == 1 and rates[first] == pytest.approx(0.1)


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
def test_a_tiny_variant_runs_to_its_end(name, tmp_path):
    path = FOLDER / "tiny" / f"{name}.flags"
    task = recipes.setting_of(parsed(path).task).task
    folder = DATA / DATA_FOLDERS[task]
    if not folder.exists():
        pytest.skip(f"no data in ../shared/data/{folder.name}")
    if folder.name == "tfds":
        pytest.importorskip("tensorflow_datasets")
    text = run(path, f"--data_dir={folder}", f"--output_dir={tmp_path}", timeout=300)
    recorded = records.read(str(tmp_path / "metrics.jsonl"))
    assert recorded and not any(record.get("diverged") for record in recorded)
    assert (tmp_path / "table.md").read_text().strip() in text
    assert all(picture.stat().st_size > 10_000 for picture in tmp_path.glob("*.png"))
    assert list(tmp_path.glob("*.png"))
