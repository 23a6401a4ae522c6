"""Ways to read sorted files visit every record once, and balanced blocks follow the papers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import block_runs, block_tasks, blocks
from experiments.block_runs import Run
from experiments.block_tasks import SETTINGS, Arm
from experiments.results import records
from tests import reference
from tests.shared_data import need
from tests.studies import parsed

DIGITS = SETTINGS["digits"]
SMALL = DIGITS._replace(
    num_records=256, sizes=(1, 8),
    recipe=DIGITS.recipe._replace(epochs=2, learning_rates=(0.125, 0.5)),
)  # fmt: skip


def data():
    return block_tasks._digits(None, SMALL.num_records)


def test_every_way_of_reading_visits_each_record_once():
    arms, found = block_tasks.arms_of(SMALL, (1, 2, 8), (1, 2)), data()
    assert [*arms][:3] == ["full", "file", "buffer"] and len(arms) == 3 + 2 + 3 + 2
    for name, arm in arms.items():
        program = block_runs.build(arm, SMALL, found)
        orders = np.random.default_rng(3).permutation(256 // arm.size).reshape(4, -1)
        if arm.order == "file":
            orders = np.asarray(program.init(3).orders.current)
        read, places = program.read(orders, 0, 3)
        windows, batches, *_ = read.shape
        assert read.shape == (windows, batches, 4, 4) and windows * batches == program.steps
        assert sorted(read.ravel()) == list(range(256))
        for w in range(4):  # its block is the one whose place in the order this is
            units = orders[w].reshape(windows, 1, arm.window)
            own = np.take_along_axis(units, places[:, :, w].reshape(windows, 1, -1), axis=2)
            np.testing.assert_array_equal(own.ravel(), read[:, :, w].ravel() // arm.size)
        steps = read.reshape(program.steps, 16)
        if name == "file":
            np.testing.assert_array_equal(steps.ravel(), np.arange(256))
        if name == "buffer":
            assert (np.sort(steps.reshape(-1, 32), axis=1).ravel() == np.arange(256)).all()


def test_balanced_blocks_equal_the_reference_and_steps_those_of_a_loop():
    arm, found = Arm("balanced", 4, 2), data()
    program = block_runs.build(arm, SMALL, found)
    state = program.init(0)
    batches = program.read(np.asarray(state.orders.current), 0, 0)
    rates = np.zeros(batches[0].shape[:2], np.float32)
    still = jax.jit(program.epoch)(state, rates, *batches)

    @jax.jit
    def gradient(params, units):
        batch = jax.tree.map(lambda x: jnp.asarray(x)[units], found.train)
        return jax.grad(lambda p: jnp.mean(found.model.loss(p, batch, None)))(params)

    flat = lambda tree: jax.flatten_util.ravel_pytree(tree)[0]  # noqa: E731
    gradients = [flat(gradient(state.params, u)) for u in np.arange(256).reshape(64, 4)]
    expected = reference.dealt_epoch(
        np.asarray(state.orders.current), np.array(gradients), "round_robin"
    )
    np.testing.assert_array_equal(still.orders.current, expected)
    moved = jax.jit(program.epoch)(state, rates + 0.3, *batches)
    params, mean = state.params, jax.tree.map(jnp.zeros_like, state.params)
    for step in batches[0].reshape(-1, 16):
        params = jax.tree.map(lambda p, g: p - 0.3 * g, params, gradient(params, step))
        mean = jax.tree.map(lambda m, p: m + p / 16, mean, params)
    for own, other in ((moved.params, params), (moved.mean, mean)):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), own, other)
    losses = found.model.loss(params, found.train, None)
    assert program.loss(params) == pytest.approx(float(losses.mean()), rel=1e-5)


def test_runs_side_by_side_equal_single_ones_and_rates_follow_their_schedule():
    arm, found = Arm("shuffled", 8, 1), data()
    runs = [Run("constant", 0.5, 0), Run("cosine", 0.5, 1)]
    train = block_runs.trained(arm, SMALL, found, after_epoch=lambda count: None)
    alone = [train([run])[0] for run in runs]
    np.testing.assert_allclose(train(runs), alone, rtol=1e-4)
    assert alone[0] != alone[1]
    constant, cosine = (block_runs._rates(SMALL, run, 16) for run in runs)
    assert (constant == 0.5).all() and cosine[0, 0] == 0.5 and cosine[1, -1] < 0.02
    for sizes, windows in (((7,), (1,)), ((4,), (1, 3)), ((128,), (1,))):
        with pytest.raises(ValueError, match="64 records of a worker are not whole windows of"):
            block_tasks.arms_of(SMALL, sizes, windows)


def test_the_study_writes_tables_and_pictures_and_resumes(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(blocks, "SETTINGS", {"digits": SMALL})
    flags = "--seeds=2", "--sizes=8", "--windows=1", "--schedules=constant,cosine"

    def run():
        blocks.main(parsed(blocks, *flags, f"--output_dir={tmp_path}"))
        return capsys.readouterr().out, records.read(str(tmp_path / records.METRICS))

    said, found = run()
    assert len(found) == 5 * 2 * 2 * 2 and {r["step"] for r in found} == {32}
    by_arm = {r["arm"]: (r["requests"], r["bytes"]) for r in found}
    assert by_arm["full"] == (256, 256 * (4095 + 65)) and by_arm["file"] == (1, 256 * 65)
    assert by_arm["balanced_8x1"] == (32, 32 * (4095 + 8 * 65))
    assert "blocks of 8, balanced" in (tmp_path / "table_digits.md").read_text() in said
    assert "cosine" in (tmp_path / "table_borders.md").read_text() in said
    pictures = sorted(path.name for path in tmp_path.glob("*.png"))
    names = "constant_rate", "constant_rate_averaged", "cosine"
    assert pictures == [f"blocks_{name}.png" for name in names]
    monkeypatch.setattr(blocks, "trained", None)  # nothing is left to train
    assert run() == (said, found)


def test_data_of_other_tasks_need_their_folder():
    with pytest.raises(ValueError, match="hmda_county: pass --data_root=DIR, which holds hmda"):
        block_tasks.load("hmda_county", None)


@pytest.mark.slow
def test_applications_are_sorted_by_county_or_by_their_end():
    found = block_tasks._hmda(need("hmda"), 4096, by_target=False)
    counties = found.train["x"][:, block_tasks.COUNTY]
    assert (np.diff(counties) >= 0).all() and len(np.unique(counties)) == 21
    found = block_tasks._hmda(need("hmda"), 4096, by_target=True)
    assert (np.diff(found.train["y"]) >= 0).all() and len(found.train["x"]) == 4096


def test_the_text_is_in_sequence():
    some, more = (
        block_tasks._shakespeare(need("tinyshakespeare"), n).train["x"] for n in (64, 128)
    )
    assert some.shape == (64, 32)
    np.testing.assert_array_equal(some, more[::2])
