"""What a contributor writes to add one of each kind: new files, and changes of others."""

from typing import NamedTuple


class Addition(NamedTuple):
    most: int  # files, to a green CI
    new: dict[str, str]  # {path: text}
    changes: tuple[tuple[str, str, str], ...] = ()  # (path, what stands there once, what then)


def before(path: str, mark: str, text: str) -> tuple[str, str, str]:
    return path, mark, text + mark


ROWS = "experiments/compare/rows.py"
ADDITIONS = {
    "order": Addition(
        4,
        {
            "ordering/backwards.py": '''"""Every other epoch goes backwards."""

from ordering.base import Ordering
from ordering.shuffles import Shuffled


class Backwards(Shuffled):
    """What `backwards` returns."""

    def draw(self, key, epoch, current):
        return current[::-1]


def backwards(num_units: int, *, units_per_step: int = 1) -> Ordering:
    """One permutation, which every other epoch visits backwards.

    Args:
      num_units: M >= 1.
      units_per_step: B in [1, M], the units of a step.

    Returns:
      An `Ordering`; `observe` ignores the gradients.

    Raises:
      ValueError: if a size is out of range.

    Examples:
      >>> import jax
      >>> from syncopate import ordering
      >>> state = ordering.backwards(8).init(jax.random.key(0), params=None)
      >>> state.next.tolist() == state.current.tolist()[::-1]
      True
    """
    return Backwards(num_units=num_units, units_per_step=units_per_step)
'''
        },
        (
            before(
                "ordering/__init__.py",
                "from ordering.base import Ordering, init_workers\n",
                "from ordering.backwards import backwards\n",
            ),
            before("ordering/__init__.py", '    "baselines",\n', '    "backwards",\n'),
            before(
                ROWS,
                '    "unzip": Order(\n',
                '    "backwards": Order(\n'
                '        "to and fro",\n'
                "        lambda s: syncopate.ordering.backwards(s.num_units),\n"
                "        observes=False,\n"
                "    ),\n",
            ),
        ),
    ),
    "sign rule": Addition(
        3,
        {},
        (
            before(
                "ordering/baselines/rules.py",
                "class WalkState(NamedTuple):\n",
                '''class Alternating(SignRule):
    """What `alternating` returns."""

    def init(self, key):
        return jnp.zeros((), jnp.int32)

    def sign(self, state, dot, norm2, coin):
        return state + 1, plus_iff(state % 2 == 0)

    def next_epoch(self, state):
        return jnp.zeros_like(state)


def alternating() -> SignRule:
    """The signs +, -, +, ... of an epoch's vectors.

    Returns:
      A `SignRule` that looks at no product.

    Examples:
      >>> from syncopate import ordering
      >>> rule = ordering.baselines.alternating()
    """
    return Alternating()


''',
            ),
            (
                "ordering/baselines/__init__.py",
                "import kernel_halving",
                "import alternating, kernel_halving",
            ),
            before(
                "ordering/baselines/__init__.py",
                '    "block_reshuffling",\n',
                '    "alternating",\n',
            ),
            before(
                ROWS,
                '        "walk": lambda',
                '        "alternate": lambda: syncopate.ordering.baselines.alternating(),\n',
            ),
        ),
    ),
    "sync rule": Addition(
        3,
        {},
        (
            before(
                "local_opt/rules.py",
                "def bernoulli(",
                '''def thirds(*, total_steps: int) -> SyncPlan:
    """Three rounds of equal length, whatever the run.

    Args:
      total_steps: T in 1 .. 10^7.

    Returns:
      The plan.

    Raises:
      ValueError: for a number of steps out of range.

    Examples:
      >>> from syncopate import local_opt
      >>> local_opt.thirds(total_steps=9).periods.tolist()
      [3, 3, 3]
    """
    total_steps = check_total_steps(total_steps)
    return SyncPlan(np.arange(0, total_steps, -(-total_steps // 3)), total_steps, "thirds")


''',
            ),
            (
                "local_opt/__init__.py",
                "import bernoulli, constant, qsr",
                "import bernoulli, constant, qsr, thirds",
            ),
            before("local_opt/__init__.py", '    "top_k",\n', '    "thirds",\n'),
            before(
                ROWS,
                '    "swap": functools',
                '    "thirds": functools.partial(\n'
                "        local_rounds,\n"
                '        "thirds",\n'
                "        lambda run: syncopate.local_opt.thirds(total_steps=run.total_steps),\n"
                "    ),\n",
            ),
        ),
    ),
    "echo policy": Addition(
        3,
        {},
        (
            before(
                "ordering/echo/plans.py",
                "def error_diffusion(",
                '''def late(*, total_steps: int) -> EchoPlan:
    """No echo in the first half of a run, then every batch twice.

    Args:
      total_steps: T in 1 .. 10^7.

    Returns:
      The plan.

    Raises:
      ValueError: for a number of steps out of range.

    Examples:
      >>> from syncopate import ordering
      >>> ordering.echo.late(total_steps=6).uses.tolist()
      [1, 1, 2, 2]
    """
    steps = np.arange(plans.check_total_steps(total_steps))
    return EchoPlan((steps < total_steps // 2) | (steps % 2 == 0), "late")


''',
            ),
            ("ordering/echo/__init__.py", "    fixed,\n)", "    fixed,\n    late,\n)"),
            before("ordering/echo/__init__.py", '    "repeat",\n', '    "late",\n'),
            before(
                ROWS,
                '    "measured": EchoPolicy(',
                '    "late": EchoPolicy(\n'
                '        "late, in half of the steps",\n'
                "        lambda c: syncopate.ordering.echo.late(total_steps=c.total_steps),\n"
                "    ),\n",
            ),
        ),
    ),
    "data set": Addition(
        3,
        {
            "experiments/data/blobs.py": '''"""Two clouds of points in a plane."""

import numpy as np

from experiments.data.base import Recipe, Task, abstract_sets, check_model, network

RECIPE = Recipe(
    workers=2, units_per_step=2, unit_size=1, learning_rates=(0.1, 0.3), epochs=4, momentum=0.0
)


def load(
    data_dir: str | None = None,
    model: str = "softmax",
    *,
    distance: float = 1.0,
    abstract: bool = False,
) -> Task:
    """40 points, which train and test; `distance` is that of the clouds."""
    check_model("blobs", model, ("softmax",))
    net = network("softmax_regression", num_features=2, num_classes=2)
    if abstract:
        return Task("blobs", net, *abstract_sets((40, 40), (2,)), RECIPE)
    y = np.arange(40, dtype=np.int32) % 2
    x = np.random.default_rng(0).normal(size=(40, 2)) + distance * y[:, None]
    part = {"x": x.astype(np.float32), "y": y}
    return Task("blobs", net, part, part, RECIPE)
'''
        },
        (
            ("experiments/data/__init__.py", "import imagenet", "import blobs, imagenet"),
            before("experiments/data/__init__.py", '    "cifar10": ', '    "blobs": blobs.load,\n'),
        ),
    ),
    "model": Addition(
        3,
        {
            "models/angles.py": '''"""Logits from the directions of weights."""

import jax
import jax.numpy as jnp

from models import base
from models.base import Model


@base.checked
def cosine_classifier(*, num_features: int, num_classes: int, l2: float = 0.0) -> Model:
    """Logits w_c^T x / |w_c|, so that the length of a class's weights changes nothing.

    Args:
      num_features: D_in >= 1.
      num_classes: C >= 2.
      l2: >= 0.

    Returns:
      A `Model` for batches {"x": float[n, D_in], "y": int[n]}.

    Raises:
      ValueError: if a size is out of range.

    Examples:
      >>> import models
      >>> model = models.cosine_classifier(num_features=64, num_classes=10)
    """

    def init(key):
        return {"w": jax.random.normal(key, (num_features, num_classes))}

    def predict(params, x):
        base.check_array("x", x, (None, num_features), flat=True)
        length = jnp.linalg.norm(params["w"], axis=0, keepdims=True)
        return x.reshape(x.shape[0], -1) @ (params["w"] / length)

    return Model(init, base.softmax_loss(predict, l2), predict)
'''
        },
        (
            before(
                "models/__init__.py",
                "from models.base import Model\n",
                "from models.angles import cosine_classifier\n",
            ),
            before("models/__init__.py", '    "forecaster",\n', '    "cosine_classifier",\n'),
            before(
                "experiments/data/images.py",
                "\ndef digits(\n",
                'DIGITS_MODELS["cosine"] = lambda **unused: base.network(\n'
                '    "cosine_classifier", num_features=DIGITS_FEATURES, num_classes=10\n'
                ")\n\n",
            ),
        ),
    ),
    "schedule": Addition(
        2,
        {},
        (
            before(
                "experiments/data/schedules.py",
                "SCHEDULES = {\n",
                """def power(recipe, steps, epoch):
    import optax

    return optax.polynomial_schedule(1.0, recipe.floor, 0.5, steps)


""",
            ),
            before(
                "experiments/data/schedules.py",
                '    "step": staircase',
                '    "power": power,\n',
            ),
        ),
    ),
    "preset": Addition(
        3,
        {},
        (
            (
                "local_opt/presets.py",
                '"normalize_by_period", ',
                '"normalize_by_period", "plain_momentum", ',
            ),
            before(
                "local_opt/presets.py",
                "def slowmo(\n",
                '''def plain_momentum(
    inner: optax.GradientTransformation,
    plan: SyncPlan,
    *,
    axis_name: AxisName = AXIS,
    momentum: float = 0.5,
) -> optax.GradientTransformationExtraArgs:
    """Local steps, and momentum without Nesterov's term on the mean change of a round.

    Args:
      inner: the workers' optimizer.
      plan: when workers synchronise.
      momentum: of the outer optimizer, in [0, 1).
      axis_name: see `local_rounds`.

    Returns:
      A GradientTransformationExtraArgs, as `local_steps`.

    Raises:
      ValueError: for values out of range, and as `local_steps`.

    Examples:
      >>> import optax
      >>> from syncopate import local_opt
      >>> plan = local_opt.constant(50, total_steps=5000)
      >>> optimizer = local_opt.presets.plain_momentum(optax.sgd(0.1), plan)
    """
    outer = outer_momentum("plain_momentum", plan, 1.0, momentum, nesterov=False)
    return local_steps(inner, plan, axis_name=axis_name, outer=outer)


''',
            ),
            before(
                ROWS,
                "OUTER: dict[str, Callable] = {",
                "def _heavy(momentum: float):\n    import optax\n\n"
                "    return optax.sgd(1.0, momentum)\n\n\n",
            ),
            before(
                ROWS,
                "COMPRESS = Option(",
                'OUTER["momentum0.5"] = lambda: _heavy(0.5)\n',
            ),
        ),
    ),
    "compressor": Addition(
        3,
        {},
        (
            before(
                "local_opt/formats.py",
                "def top_k(\n",
                '''def forgetting(*, feedback: float = 0.5) -> Compressor:
    """Changes rounded to int8, of whose errors the next sync sends a part again.

    Args:
      feedback: in [0, 1].

    Returns:
      A `Compressor`.

    Raises:
      ValueError: for a feedback out of range.

    Examples:
      >>> from syncopate import local_opt
      >>> compressor = local_opt.forgetting(feedback=0.25)
    """
    return quantize("int8", feedback=check_number("feedback", feedback, "[0, 1]"))


''',
            ),
            ("local_opt/__init__.py", "import Compressor, ", "import Compressor, forgetting, "),
            before("local_opt/__init__.py", '    "from_function",\n', '    "forgetting",\n'),
            before(
                ROWS,
                '    "int4": lambda: ',
                '    "forgetting": lambda: syncopate.local_opt.forgetting(),\n',
            ),
        ),
    ),
    "scalar": Addition(
        1,
        {},
        (
            before(
                "experiments/trainer/step.py",
                '    "drift": Scalar(  #',
                '    "losses/spread": '
                'Scalar("step", lambda worker, state, losses: jnp.std(losses)),\n',
            ),
        ),
    ),
    "metric": Addition(
        1,
        {},
        (
            before(
                "experiments/data/metrics.py",
                "METRICS = {\n",
                """def _brier(model):
    import jax

    def measure(params, statistics, batch):
        predict = predicting(model, params, statistics)

        def errors(part):
            p = jax.nn.softmax(predict(part["x"]))
            return sum_examples((p - jax.nn.one_hot(part["y"], p.shape[-1])) ** 2)

        return sum_chunks(errors, batch)

    return measure


""",
            ),
            before(
                "experiments/data/metrics.py",
                '    "loss": Metric(',
                '    "brier": Metric("test Brier score", True, _brier),\n',
            ),
        ),
    ),
    "study": Addition(
        2,
        {
            "experiments/to_and_fro.py": '''"""Does going to and fro help?"""

from experiments.compare import study
from experiments.compare.arms import Arm
from experiments.compare.study import Study
from experiments.report import plots, tables
from experiments.report.statistics import Criterion

STUDY = Study(
    "to_and_fro",
    {
        "rr": Arm("D-RR", order="rr"),
        "backwards": Arm("to and fro", order="backwards"),
        "signs": Arm("alternating signs", order="cd_grab+alternate"),
        "all": Arm(
            "all that is new", order="backwards", sync="thirds+forgetting+momentum0.5", echo="late"
        ),
    },
    recipe="blobs",
    criterion=Criterion("train/loss"),
    columns=tables.SYNC_COLUMNS,
    panels=(plots.Panel("train/loss", ("step", "rounds")), plots.Panel("test/brier")),
    question=__doc__,
)

if __name__ == "__main__":
    study.main(STUDY)
'''
        },
        (
            before(
                "docs/use/command_line.md",
                "| `launch` |",
                "| `to_and_fro` | a study: compares an order with its reverse | ten seconds |\n",
            ),
        ),
    ),
}
