"""The examples of flax.nnx and Grain train, and adopting orders takes ten lines."""

import difflib
import importlib.util
import pathlib

import pytest

pytest.importorskip("grain", reason="Grain is not installed: pip install grain")
nnx = pytest.importorskip("flax.nnx", reason="flax is not installed: pip install flax")

FOLDER = pathlib.Path(__file__).parents[1] / "examples" / "nnx_grain"


def example(name):
    spec = importlib.util.spec_from_file_location(f"nnx_grain_{name}", FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def code_lines(name):
    """Without the docstring, which is one line, and blank lines."""
    lines = (FOLDER / f"{name}.py").read_text().splitlines()
    assert lines[0].startswith('"""') and lines[0].endswith('"""')
    return [line for line in lines[1:] if line.strip()]


@pytest.mark.parametrize("name", ["orders", pytest.param("plain", marks=pytest.mark.slow)])
def test_an_example_trains(name):
    found = example(name).main(seed=0, epochs=3)
    assert len(found["losses"]) == 3
    assert found["losses"][-1] < 0.5 * found["losses"][0]
    assert found["train"]["loss"] < 1 and found["valid"]["accuracy"] > 0.75


def test_every_epoch_reads_all_examples(monkeypatch):
    orders = example("orders")
    read, epochs = orders.ordering.input.map_dataset, []

    def map_dataset(examples, order, **sizes):
        epochs.append(order.tolist())
        return read(examples, order, **sizes)

    monkeypatch.setattr(orders.ordering.input, "map_dataset", map_dataset)
    monkeypatch.setattr(orders, "train_step", lambda *given: given[3])
    orders.main(epochs=2)
    assert [sorted(order) for order in epochs] == 2 * [list(range(orders.TRAIN))]


def test_orders_are_adopted_in_ten_lines():
    changed = difflib.ndiff(code_lines("plain"), code_lines("orders"))
    assert 0 < sum(line.startswith("+ ") for line in changed) <= 10
