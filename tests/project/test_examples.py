"""The examples run, what they change is counted, and what they change is what they say.

pytest -m slow -n 0 tests/project/test_examples.py    # whole runs: two minutes
"""

import difflib
import importlib
import operator
import pathlib
import re
import shlex
import sys

import numpy as np
import pytest

import syncopate
from tests.cases import mostly_slow
from tests.installed import PACKAGES, ended, module_of, ran

FOLDER = pathlib.Path(__file__).resolve().parents[2] / "examples"
# Folder, adopted file, the most lines of it that may be new.
ADOPTED = [
    ("gpt", "local_steps", 10),
    ("gpt", "cd_grab", 20),
    ("gpt", "streaming", 40),
    ("equinox_echoing", "echoing", 10),
    ("optax_only", "local_steps", 10),
    ("nnx_grain", "orders", 10),
    ("nnx_grain", "local_steps", 16),
]
NAMES = [f"{folder}/{name}" for folder, name, _ in ADOPTED]


def lines_of(folder, name):
    """The lines of code, without the text at the top."""
    text = (FOLDER / folder / f"{name}.py").read_text()
    return [line for line in text.split('"""', 2)[2].split("\n") if line.strip()]


@pytest.fixture
def load(monkeypatch):
    """A file of an example, as a script finds its neighbours."""

    def module(folder, name):
        monkeypatch.syspath_prepend(FOLDER / folder)
        return module_of(FOLDER / folder / f"{name}.py")

    yield module
    sys.modules.pop("model", None)


@pytest.mark.parametrize("folder,name,most", ADOPTED, ids=NAMES)
def test_few_lines_change(folder, name, most):
    difference = difflib.ndiff(lines_of(folder, "plain"), lines_of(folder, name))
    new = [line for line in difference if line.startswith("+ ")]
    assert 0 < len(new) <= most, "\n".join(new)
    readme = (FOLDER / "README.md").read_text()
    assert f"| [{folder}/{name}.py]({folder}/{name}.py) | {len(new)} |" in readme


def test_a_gpt_with_local_steps_meets_seldom_and_learns(load):
    example = load("gpt", "local_steps")
    result = example.main(steps=30, warmup=3, length=16)
    assert 2.0 < result["valid"] < 3.4, "uniform bytes: log 128 = 4.85"


def test_a_gpt_in_balanced_orders_visits_every_unit_and_learns(load, monkeypatch):
    example, seen = load("gpt", "cd_grab"), []
    step = example.train_step

    def noted(state, orders, batch):
        seen.append(np.asarray(batch)[:, :, :3])
        return step(state, orders, batch)

    monkeypatch.setattr(example, "train_step", noted)
    result = example.main(steps=65, length=16)
    assert 2.0 < result["valid"] < 3.4
    first = np.stack(seen[:64]).reshape(-1, 3)
    assert len(np.unique(first, axis=0)) == len(
        np.unique(example.sequences(16, 2048)[:, :3], axis=0)
    )


def test_an_optax_loop_ends_where_parallel_training_ends(load):
    plain, local = load("optax_only", "plain"), load("optax_only", "local_steps")
    np.testing.assert_allclose(local.main()["train"], plain.main()["train"], rtol=0.05)


def test_an_equinox_loop_loads_less(load, monkeypatch):
    example = load("equinox_echoing", "echoing")
    monkeypatch.setattr(example, "STEPS", 24)
    monkeypatch.setattr(example, "SECONDS", 0.1)  # longer than any step
    loads = []
    slow = example.slow_loader

    def counted(*args):
        for batch in slow(*args):
            loads.append(1)
            yield batch

    monkeypatch.setattr(example, "slow_loader", counted)
    assert np.isfinite(example.main()["valid"])
    assert 24 / 8 <= len(loads) < 24


def test_an_nnx_loop_with_grain_trains_and_every_epoch_reads_all_examples(load, monkeypatch):
    pytest.importorskip("grain", reason="Grain is not installed: pip install grain")
    orders = load("nnx_grain", "orders")
    read, epochs = orders.ordering.data.grain_dataset, []

    def noted(examples, order):
        epochs.append(order.tolist())
        return read(examples, order)

    monkeypatch.setattr(orders.ordering.data, "grain_dataset", noted)
    result = orders.main(seed=0, epochs=3)
    assert len(result["losses"]) == 3 and result["losses"][-1] < 0.5 * result["losses"][0]
    assert result["train"]["loss"] < 1 and result["valid"]["accuracy"] > 0.75
    assert [sorted(order) for order in epochs] == 3 * [list(range(orders.TRAIN))]


def test_an_nnx_loop_with_local_steps_trains_and_ends_with_one_model(load, monkeypatch):
    pytest.importorskip("grain", reason="Grain is not installed: pip install grain")
    example, ended = load("nnx_grain", "local_steps"), []
    mean_over_workers = example.local_opt.mean_over_workers

    def noted(state):
        example.local_opt.check_synced(state, ulps=4)
        ended.append(state)
        return mean_over_workers(state)

    monkeypatch.setattr(example.local_opt, "mean_over_workers", noted)
    result = example.main(seed=0, learning_rate=0.2, epochs=3)
    assert len(ended) == 1 and result["losses"][-1] < 0.5 * result["losses"][0]
    assert result["train"]["loss"] < 1 and result["valid"]["accuracy"] > 0.75


COMMAND = re.compile(r"^python (examples/.*?)(?:  +#.*)?$", re.M)
COMMANDS = [
    line for path in sorted(FOLDER.rglob("*.md")) for line in COMMAND.findall(path.read_text())
]
FEWER = {r"--seeds=\d": "--seeds=2", r"(--learning_rates=[^,]*),\S*": r"\1"}


def as_documented(command, package):
    """What a command of a page prints, in a clone, where only the package is installed."""
    for long, short in FEWER.items():
        command = re.sub(long, short, command)
    return ran([sys.executable, *shlex.split(command)], FOLDER.parent, PYTHONPATH=package)


def test_the_scripts_import_nothing_that_is_not_installed_with_the_package():
    ours = {path.parent.name for path in FOLDER.parent.glob("*/__init__.py")} - {*PACKAGES}
    for path in FOLDER.rglob("*.py"):
        named = re.findall(r"^ *(?:import|from) (\w+)", path.read_text(), re.M)
        assert not ours & {*named}, path


def test_the_shortest_command_of_the_page_runs_as_documented(unpacked):
    (command,) = [line for line in COMMANDS if "measure.py optax_only" in line]
    head, _, *rows = as_documented(command, unpacked).splitlines()
    assert head.split("|")[1].strip() == "file" and len(rows) == 2
    assert [row.split("|")[1].strip() for row in rows] == ["plain.py", "local_steps.py"]


def test_an_interval_is_that_of_the_definition():
    code = "import measure; print(*measure.interval([1.0, 2.0, 4.0]))"
    half = 4.302653 * np.std([1.0, 2.0, 4.0], ddof=1) / np.sqrt(3)  # two degrees of freedom
    result = ran([sys.executable, "-c", code], FOLDER).split()
    np.testing.assert_allclose([*map(float, result)], [7 / 3, half], rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_of_the_pages_runs_as_documented(command, unpacked):
    assert as_documented(command, unpacked).strip()


@pytest.mark.slow
@pytest.mark.parametrize("folder,name,most", ADOPTED, ids=NAMES)
def test_a_whole_run_ends_near_the_plain_one(load, folder, name, most):
    plain, adopted = load(folder, "plain").main(), load(folder, name).main()
    scalar = "valid" if "valid" in plain else "train"
    assert adopted[scalar] < 1.5 * plain[scalar]


@pytest.mark.parametrize("plain", mostly_slow((False, True), quick=(True,)))
def test_a_single_file_takes_each_decision_by_one_line(plain, capsys):
    """Every line whose plain choice stands behind it is exchanged, and the file still runs."""
    text = (FOLDER / "single_file.py").read_text()
    assert len(text.splitlines()) <= 120
    small = {"UNITS, BATCH, CONTEXT = 4, 256, 8, 64": "UNITS, BATCH, CONTEXT = 4, 8, 4, 8"}
    small |= {"64, 4, 2, 640, 1024": "16, 2, 1, 12, 32", "3e-3, 50,": "3e-3, 3,", "% 64": "% 4"}
    for line, other in small.items():
        assert line in text
        text = text.replace(line, other)
    if plain:
        choice = re.compile(r"^([A-Z]+ = ).*\n# \1(.*)$", re.M)
        text, count = choice.subn(r"\1\2", text)
        assert count == 3
    results = {"__name__": "single_file"}
    exec(compile(text, "single_file.py", "exec"), results)
    mean = results["main"]()
    assert all(np.isfinite(leaf).all() for leaf in mean.values())
    first, *steps = capsys.readouterr().out.splitlines()
    assert first == f"{12 if plain else 3} syncs and {12 if plain else 6} loads in 12 steps"
    assert [line.split(":")[0] for line in steps] == ["step 4", "step 8", "step 12"]


def test_workers_of_four_devices_each_train_a_decoder_on_a_mesh_as_jax_makes_it(load):
    example = load("", "two_axes")
    losses = example.main()
    assert len(losses) == len(example.plan.starts) and losses[-1] < 0.5 * losses[0]
    assert len(set(np.diff(example.plan.starts))) > 1


@pytest.mark.parametrize("rollouts", mostly_slow((4, 70), quick=(4,)))
def test_rollouts_that_are_used_again_need_fewer(load, capsys, rollouts):
    example = load("", "grpo")
    results = example.main(all_uses=(1, 4), rates=(0.02,), rollouts=rollouts)
    if rollouts > 4:  # before, nobody is there
        assert results[4, 0.02].mean() < 0.95 * results[1, 0.02].mean()
    table = (FOLDER.parent / "docs" / "use" / "reuse.md").read_text()
    head, _, once, four = capsys.readouterr().out.splitlines()
    assert (
        head == "| uses | rate 0.02 |" and once.startswith("| 1 | ") and four.startswith("| 4 | ")
    )
    assert "| uses | " + " | ".join(f"rate {rate}" for rate in example.RATES) in table


@pytest.mark.parametrize(
    "name,most",
    [
        ("nanodo/qsr", 13),
        ("nanodo/constant", 12),
        ("nanodo/cd_grab", 20),
        ("slowrun/cd_grab", 4),
    ],
)
def test_few_lines_of_others_change_by_public_names(name, most):
    _, new = changed_by((FOLDER / f"{name}.diff").read_text())
    assert len(new) <= most
    row = f"| [{name}.diff]({name}.diff) | {len(new)} |"
    assert row in (FOLDER / "README.md").read_text()
    used = re.findall(r"\b((?:local_opt|ordering)(?:\.\w+)+)", "\n".join(new))
    assert used or "balanced" in new[0]
    for name in used:
        operator.attrgetter(name)(syncopate)


def changed_by(text):
    """The lines that a diff takes away and those that it adds, which its headers count."""
    old, new = (re.findall(rf"^[{sign}](?![{sign}]{{2}} )(.*)$", text, re.M) for sign in "-+")
    sizes = np.array(re.findall(r"^@@ -\d+(?:,(\d+))? \+\d+(?:,(\d+))? @@$", text, re.M))
    assert [len(old), len(new)] == np.where(sizes == "", "1", sizes).astype(int).sum(0).tolist()
    return old, new


@pytest.mark.parametrize("folder", sorted(path.name for path in (FOLDER / "others").iterdir()))
def test_the_table_counts_the_lines_of_the_diffs(folder):
    """Without blank ones and comments."""
    counts = []
    for name in ("qsr", "order", "echo"):
        path = FOLDER / "others" / folder / f"{name}.diff"
        if not path.exists():
            continue
        _, new = changed_by(path.read_text())
        new = [line for line in new if line.strip() and not line.strip().startswith("#")]
        counts.append(f"[{len(new)}](../../examples/others/{folder}/{name}.diff)")
        used = re.findall(r"\b((?:local_opt|ordering)(?:\.\w+)+)", "\n".join(new))
        for public in used:
            operator.attrgetter(public)(syncopate)
        assert used
    table = (FOLDER.parent / "docs" / "results" / "outside.md").read_text()
    assert counts and re.search(".*".join(map(re.escape, counts)), table)


@pytest.mark.parametrize(
    "flags,says",
    [
        pytest.param(
            [],
            "--nanodo is None.* no nanodo/train.py: `git clone https://github.com/google-deepmind/n",
            marks=pytest.mark.slow,
        ),
        (["--nanodo=."], "--data_dir is None, .* no train.txt and no valid.txt: pass the folder"),
    ],
)
def test_a_script_without_what_it_needs_says_what_to_fetch(flags, says, tmp_path):
    (tmp_path / "nanodo").mkdir()
    (tmp_path / "nanodo" / "train.py").touch()
    call = [sys.executable, FOLDER / "nanodo" / "run.py", *flags]
    result = ended(call, tmp_path, PYTHONPATH=FOLDER.parent)
    assert result.returncode == 1 and re.search(f"ValueError: {says}", result.stderr)
    assert len([*tmp_path.rglob("*")]) == 2, "nothing is written"


def test_slowrun_reads_every_sequence_once_and_observes_each_microbatch(monkeypatch, tmp_path):
    torch = pytest.importorskip("torch")
    monkeypatch.syspath_prepend(FOLDER / "slowrun")
    loader_of = importlib.import_module("balanced").BalancedLoader
    torch.save({"tokens": (torch.arange(246) ** 2 % 11).to(torch.uint16)}, tmp_path / "text.pt")
    settings = {"rank": 0, "world_size": 1, "units_per_step": 2, "size": 128}
    with pytest.raises(ValueError, match="61 sequences of 4 tokens are fewer than the 1 ranks"):
        loader_of(tmp_path / "text.pt", 40, 3, "cpu", **settings)

    loader = loader_of(tmp_path / "text.pt", 3, 3, "cpu", **settings)
    weights, observed, observe = torch.zeros(11, 11, requires_grad=True), [], loader._observe
    loader._observe = lambda orders, rows: (observed.append(rows[0]), observe(orders, rows))[1]
    x, y, epoch = next(loader)
    orders, gradients = [], []
    for taken in range(3 * 20):
        assert epoch == taken // 20 + 1
        expected = loader.sequences[loader.current[taken % 20]]
        assert (x == expected[:, :-1]).all() and (y == expected[:, 1:]).all()
        loss = torch.nn.functional.cross_entropy(weights[x].mT, y)
        gradients.append(torch.autograd.grad(loss, weights, retain_graph=True)[0].flatten())
        loss.backward()
        loader.observe([weights])
        weights.grad = None if taken % 2 else weights.grad
        orders += [loader.current] if taken % 20 == 0 else []
        x, y, epoch = next(loader)
    for order in orders:
        assert len(np.unique(order)) == 60, "every sequence once, but what fills no step"
    assert any((order != orders[0]).any() for order in orders)
    rows, exact = np.concatenate(observed), torch.stack(gradients).numpy()
    np.testing.assert_allclose(rows @ rows.T, exact @ exact.T, rtol=1e-4, atol=1e-6)
