"""The examples run, what they change is counted, and what they change is what they say.

pytest -m slow -n 0 tests/project/test_examples.py    # whole runs: two minutes
"""

import difflib
import importlib.util
import pathlib
import sys

import numpy as np
import pytest

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
        path = FOLDER / folder / f"{name}.py"
        spec = importlib.util.spec_from_file_location(f"example_{folder}_{name}", path)
        found = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, spec.name, found)
        spec.loader.exec_module(found)
        return found

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
    found = example.main(steps=30, warmup=3)
    assert 2.0 < found["valid"] < 3.4, "uniform bytes: log 128 = 4.85"


def test_a_gpt_in_balanced_orders_visits_every_unit_and_learns(load, monkeypatch):
    example, seen = load("gpt", "cd_grab"), []
    step = example.train_step

    def noted(state, orders, batch):
        seen.append(np.asarray(batch)[:, :, :3])
        return step(state, orders, batch)

    monkeypatch.setattr(example, "train_step", noted)
    found = example.main(steps=65)
    assert 2.0 < found["valid"] < 3.4
    first = np.stack(seen[:64]).reshape(-1, 3)
    assert len(np.unique(first, axis=0)) == len(
        np.unique(example.sequences(64, 2048)[:, :3], axis=0)
    )


def test_an_optax_loop_ends_where_parallel_training_ends(load):
    plain, local = load("optax_only", "plain"), load("optax_only", "local_steps")
    np.testing.assert_allclose(local.main()["train"], plain.main()["train"], rtol=0.05)


def test_an_equinox_loop_loads_less(load, monkeypatch):
    example = load("equinox_echoing", "echoing")
    monkeypatch.setattr(example, "STEPS", 24)
    monkeypatch.setattr(example, "SECONDS", 0.4)  # longer than any step
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
    read, epochs = orders.ordering.input.map_dataset, []

    def map_dataset(examples, order, **sizes):
        epochs.append(order.tolist())
        return read(examples, order, **sizes)

    monkeypatch.setattr(orders.ordering.input, "map_dataset", map_dataset)
    found = orders.main(seed=0, epochs=3)
    assert len(found["losses"]) == 3 and found["losses"][-1] < 0.5 * found["losses"][0]
    assert found["train"]["loss"] < 1 and found["valid"]["accuracy"] > 0.75
    assert [sorted(order) for order in epochs] == 3 * [list(range(orders.TRAIN))]


def test_an_nnx_loop_with_local_steps_trains_and_ends_with_one_model(load, monkeypatch):
    pytest.importorskip("grain", reason="Grain is not installed: pip install grain")
    example, ended = load("nnx_grain", "local_steps"), []
    consolidate = example.local_opt.consolidate

    def noted(state):
        example.local_opt.check_synced(state[0], ulps=4)
        ended.append(state)
        return consolidate(state)

    monkeypatch.setattr(example.local_opt, "consolidate", noted)
    found = example.main(seed=0, learning_rate=0.2, epochs=3)
    assert len(ended) == 1 and found["losses"][-1] < 0.5 * found["losses"][0]
    assert found["train"]["loss"] < 1 and found["valid"]["accuracy"] > 0.75


@pytest.mark.slow
@pytest.mark.parametrize("folder,name,most", ADOPTED, ids=NAMES)
def test_a_whole_run_ends_near_the_plain_one(load, folder, name, most):
    plain, adopted = load(folder, "plain").main(), load(folder, name).main()
    scalar = "valid" if "valid" in plain else "train"
    assert adopted[scalar] < 1.5 * plain[scalar]
