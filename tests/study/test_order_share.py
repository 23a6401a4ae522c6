"""The order's part of the loss: quadratics whose answer is known, and the command."""

import jax.numpy as jnp
import numpy as np
import pytest

import models
from experiments import advise, order_share
from experiments.order_share import Losses
from experiments.results.statistics import interval
from experiments.tasks.base import Recipe, Task
from tests.studies import parsed

W, B, M, RATE = 2, 2, 12, 0.3
CURVATURE = np.geomspace(0.1, 1, 32)
SETTING = Recipe(
    workers=W, units_per_step=B, unit_size=1, learning_rates=(RATE,), epochs=6, momentum=0.0,
    average=("epoch",),
)  # fmt: skip


def quadratic():
    """f_i(x) = sum_c l_c / 2 x_c^2 - z_ic x_c from its minimum 0; mean z is 0."""
    z = np.random.default_rng(0).normal(size=(W * M, len(CURVATURE)))
    data = {"x": (z - z.mean(axis=0)).astype("f4"), "y": np.zeros(W * M, "f4")}

    def loss(x, batch, key):
        return jnp.sum(CURVATURE[None] / 2 * x[None] ** 2 - batch["x"] * x[None], axis=1)

    model = models.Model(lambda key: jnp.zeros(len(CURVATURE)), loss, None)
    return Task("quadratic", model, data, data, SETTING, lambda: 0.0, "loss")


def expected():
    """The order's part at the end and of the last epoch's mean, without an approximation.

    Of a worker's M units of variance s^2, drawn without replacement, the batch means z_t have
    var sum_t q_t z_t = s^2 M / (B (M - 1)) (sum q^2 - (sum q)^2 / n). They add up to 0 over an
    epoch, so that its mean is (x_start - x_end) (1 - eta l) / (eta l n).
    """
    units = quadratic().train["x"].astype(float).reshape(W, M, -1)
    n, keep = M // B, 1 - RATE * CURVATURE
    q = keep ** np.arange(n)[::-1, None]
    bridge = (q**2).sum(axis=0) - q.sum(axis=0) ** 2 / n
    variance = units.var(axis=1).sum(axis=0) / W**2 * M / (B * (M - 1))
    one = RATE**2 * variance * bridge  # what an epoch adds
    last = one / (1 - keep ** (2 * n))
    of_mean = ((keep**n - 1) ** 2 * last + one) * (keep / (RATE * CURVATURE * n)) ** 2
    return [0.5 * np.sum(CURVATURE * of) for of in (last, of_mean)]


def test_the_part_is_half_the_trace_of_curvature_times_covariance():
    rng = np.random.default_rng(0)
    copies, half = rng.normal(size=(5, 3)), rng.normal(size=(3, 3))
    hessian = half @ half.T

    def loss(models):
        return 7 + 0.5 * np.einsum("ni,ij,nj->n", models, hessian, models)

    found = order_share.losses_of(loss, copies)
    for out in (None, 2):
        kept = copies if out is None else np.delete(copies, out, axis=0)
        mean, part = found.share(out)
        assert mean == pytest.approx(loss(kept).mean())
        assert part == pytest.approx(0.5 * np.trace(hessian @ np.cov(kept.T)))


def test_a_trained_quadratic_has_the_part_that_its_noise_gives():
    copies = 16
    ((rate, found),) = order_share.measured(quadratic(), SETTING, copies=copies)
    assert rate == RATE
    for name, exact in zip(("last", "averaged"), expected(), strict=True):
        assert found[name].share()[1][0] == 0  # they start alike
        values = order_share.jackknife(lambda out, of=found[name]: of.share(out)[1][-1], copies)
        mean, half = interval(values)
        assert abs(mean - exact) < half < 0.3 * exact
        assert mean == pytest.approx(found[name].share()[0][-1], rel=0.5)  # all of the loss


def test_the_jackknife_of_a_mean_is_its_interval():
    values = np.array([1.0, 4.0, 2.0, 7.0])
    mean_of = lambda out: np.delete(values, [] if out is None else out).mean()  # noqa: E731
    np.testing.assert_allclose(order_share.jackknife(mean_of, 4), values)
    never = order_share.jackknife(lambda out: np.inf, 4)
    assert np.isinf(never).all()


def shares(last, averaged, part):
    """Losses of four copies: what is left without the order's part, and a part of that size.

    In averages it is a hundredth.
    """

    def losses(curve, own):
        own = own * (np.arange(len(curve)) > 0)  # they start alike
        each = np.array(curve)[:, None] + own[:, None] * np.array([0.9, 1.1, 0.95, 1.05])
        mean = each.mean(axis=1)
        without = np.repeat((mean - own * (1 - 1 / 3))[:, None], 4, axis=1)
        return Losses(each, mean - own * (1 - 1 / 4), without)

    return {0.1: {"last": losses(last, part), "averaged": losses(averaged, part / 100)}}


FALLING = [8.0, 4.0, 2.0, 1.0, 0.5]


@pytest.mark.parametrize(
    "found,words",
    [
        (shares(FALLING, FALLING, 1.0), "Average the weights"),
        (shares(FALLING, [8.0, 0.5, 0.1, 0.0, 0.0], 100.0), "Try a balanced order"),
        (shares(FALLING, FALLING, 1e-3), "Neither"),
        (shares(FALLING, FALLING, -1e-3), "too far apart"),
        (shares(FALLING, [8.0, 4.0, 2.0, 1.0, 0.6], 1e-3), "Neither"),  # some arrive nowhere
    ],
)
def test_what_is_recommended(found, words):
    assert words in order_share.report(found, above=False)


def test_the_command_tells_what_an_order_can_save(capsys):
    small = ["--num_train=96", "--num_test=20", "--workers=2", "--units_per_step=4"]
    given = [
        "--order_share",
        "--epochs=4",
        "--copies=3",
        "--learning_rates=0.5,1e30",
        "--beside=cd_grab",
    ]
    advise.run(parsed(advise, *small, *given))
    out = capsys.readouterr().out
    assert "D-RR at rate 1e+30: a copy diverges" in out and "| 0.5" in out
    assert "CD-GraB, averaged |" in out and "Averaged weights reach D-RR's last loss in" in out
