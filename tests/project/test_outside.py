"""What runs inside code bases of others keeps its promises where they are absent.

Whole runs need checkouts: docs/results/outside.md has the commands.
"""

import functools
import importlib
import itertools
import pathlib
import subprocess
import sys
import types

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import pytest

EXAMPLES = pathlib.Path(__file__).resolve().parents[2] / "examples"
ALGOPERF = ("plain", "echo", "pooled", "reshuffled", "cd_grab", "local_steps")


class Workload:
    """What a submission sees of one, of 640 examples: ten steps a pass."""

    num_train_examples, step_hint, model_params_types, loss_type = 640, 40, None, None

    def model_fn(self, params, batch, model_state, mode, rng, update_batch_norm):
        return batch["inputs"] @ params["w"], model_state

    def loss_fn(self, label_batch, logits_batch, mask_batch=None):
        return {"summed": jnp.sum((logits_batch - label_batch - 3) ** 2), "n_valid_examples": 64}

    def queue(self):
        rng = np.random.default_rng(0)
        for k in itertools.count():
            found = 1 + rng.normal(size=(64, 3)).astype(np.float32)
            names = np.arange(64 * k, 64 * (k + 1), dtype=np.float32)
            yield {"inputs": jnp.asarray(found), "targets": jnp.asarray(names / 1e4)}


@pytest.fixture
def submission(monkeypatch):
    """A submission by name, imported as AlgoPerf's runner does, with its one import of AlgoPerf."""
    spec = types.SimpleNamespace(ForwardPassMode=types.SimpleNamespace(TRAIN=0))
    monkeypatch.syspath_prepend(EXAMPLES / "algoperf")
    monkeypatch.setitem(sys.modules, "algoperf", types.ModuleType("algoperf"))
    monkeypatch.setitem(sys.modules, "algoperf.spec", spec)
    for name in ALGOPERF:
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield importlib.import_module
    for name in ALGOPERF:
        sys.modules.pop(name, None)


def steps_of(module, steps, learning_rate=0.01):
    """[(the examples of a step, its parameters before)], and what is shown for evaluation."""
    workload, queue, key = Workload(), Workload().queue(), jax.random.PRNGKey(0)
    given = types.SimpleNamespace(learning_rate=learning_rate)
    params, model_state, seen = {"w": jnp.zeros(3)}, None, []
    state = module.init_optimizer_state(workload, params, model_state, given, key)
    for step in range(steps):
        batch = module.data_selection(workload, queue, state, params, model_state, given, step, key)
        seen.append((np.rint(np.asarray(batch["targets"]) * 1e4).astype(int), params))
        state, params, model_state = module.update_params(
            workload=workload, current_param_container=params, current_params_types=None,
            model_state=model_state, hyperparameters=given, batch=batch, loss_type=None,
            optimizer_state=state, eval_results=[], global_step=step, rng=key,
        )  # fmt: skip
    _, shown, _ = module.prepare_for_eval(
        workload=workload, current_param_container=params, current_params_types=None,
        model_state=model_state, hyperparameters=given, loss_type=None, optimizer_state=state,
        eval_results=[], global_step=steps, rng=key,
    )  # fmt: skip
    return seen, shown


@pytest.mark.parametrize("name", ["cd_grab", "reshuffled"])
def test_every_pass_visits_every_example_once_in_an_order_of_its_own(submission, name):
    seen = [names for names, _ in steps_of(submission(name), 30)[0]]
    passes = np.stack(seen).reshape(3, -1)
    np.testing.assert_array_equal(np.sort(passes, axis=1), np.tile(np.arange(640), (3, 1)))
    np.testing.assert_array_equal(passes[0], np.arange(640))  # as they came
    assert (passes[1] != passes[2]).any() and (passes[0] != passes[1]).any()
    # What a worker has received stays with it: place 16 w .. 16 w + 15 of every batch.
    workers = passes.reshape(3, 10, 4, 16)
    for w in range(4):
        np.testing.assert_array_equal(np.unique(workers[1, :, w] // 16 % 4), [w])


def test_an_echoed_step_uses_the_batch_that_the_plan_says(submission):
    echo = submission("echo")
    seen = [names for names, _ in steps_of(echo, 44)[0]]
    plan = echo.error_diffusion(echo.LOADS_PER_STEP, total_steps=40)
    loads = np.cumsum(np.concatenate([plan.fresh, np.ones(4, bool)])) - 1
    np.testing.assert_array_equal([names[0] // 64 for names in seen], loads)
    assert plan.loads == 20 and loads[-1] == 23, "past its end every step loads"


def test_an_order_that_does_not_echo_learns_as_plain_adam_in_its_first_pass(submission):
    plain, pooled = (steps_of(submission(name), 10)[1] for name in ("plain", "cd_grab"))
    np.testing.assert_allclose(plain["w"], pooled["w"], rtol=1e-5, atol=1e-7)


def test_local_steps_show_the_mean_and_leave_what_the_judge_holds(submission):
    local = submission("local_steps")
    seen, shown = steps_of(local, 6)
    assert all((params["w"] == 0).all() for _, params in seen)
    assert (shown["w"] != 0).all()
    state, kept = local.init_optimizer_state(
        Workload(), shown, None, types.SimpleNamespace(learning_rate=0.1), jax.random.PRNGKey(0)
    )
    assert state["params"]["w"].shape == (4, 3)
    assert kept["plan"].total_steps == 40 and kept["plan"].rounds < 10


class Train:
    """What nanodo's module of that name holds, for a state of one number."""

    class Trainer:
        def __init__(self, train, state):
            self.state, self.step_fn = state, functools.partial(train._train_step, mesh=None, c=1.0)

        def do_step(self, step, in_BxL):
            self.state, metrics = self.step_fn(self.state, in_BxL)
            return metrics

    @staticmethod
    def _init_train_state(start):
        return "shardings", State(jnp.float32(start), jnp.int32(0))

    @staticmethod
    def _train_step(state, in_BxL, c, mesh=None):
        state = state.replace(params=state.params - c * in_BxL.mean(), step=state.step + 1)
        return state, {"loss": in_BxL.mean()}


@flax.struct.dataclass
class State:
    params: jax.Array
    step: jax.Array


class Evaluate:
    class Evaluator:
        def eval(self, params):
            return params


def test_four_names_make_nanodos_trainer_meet_where_the_plan_says(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES / "nanodo")
    monkeypatch.delitem(sys.modules, "local_steps", raising=False)
    local = importlib.import_module("local_steps")
    sys.modules.pop("local_steps")
    plan = local.plan_of("constant", None, types.SimpleNamespace(num_train_steps=8))
    for target, name, new in local.adopted(Train, Evaluate, plan):
        monkeypatch.setattr(target, name, new)
    shardings, state = Train._init_train_state(1)
    trainer = Train.Trainer(Train, state)
    batch = np.array([[0.0], [1.0], [2.0], [5.0]], np.float32)  # a row per worker; their mean is 2
    for step in range(8):
        metrics = trainer.do_step(step, batch)
        apart = float(np.ptp(trainer.state.params))
        assert (shardings, trainer.step, float(metrics["loss"])) == ("shardings", step + 1, 2.0)
        assert apart == (0 if step in (3, 7) else 5 * (step % 4 + 1))
        assert float(Evaluate.Evaluator().eval(trainer.state.params)) == 1 - 2 * (step + 1)
    trainer.do_step(8, batch)  # nanodo makes one step more than its config says
    with pytest.raises(ValueError, match="plain,constant,qsr"):
        local.plan_of("diloco", None, None)


def test_the_lines_that_nanodo_takes_are_counted():
    text = (EXAMPLES / "nanodo/local_steps.py").read_text().split('"""', 2)[2]
    lines = [line for line in text.split("\n") if line.strip()]
    assert (
        f"| [nanodo/local_steps.py](nanodo/local_steps.py) | {len(lines)} |"
        in (EXAMPLES / "README.md").read_text()
    )


@pytest.mark.parametrize(
    "script,says",
    [
        ("algoperf/run.py", "git clone https://github.com/mlcommons/algorithmic-efficiency"),
        ("nanodo/run.py", "git clone https://github.com/google-deepmind/nanodo"),
    ],
)
def test_a_script_without_its_checkout_says_what_to_fetch(script, says, tmp_path):
    command = [sys.executable, str(EXAMPLES / script), f"--{script.split('/')[0]}={tmp_path}"]
    found = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert found.returncode == 1
    assert "ValueError" in found.stderr and says in found.stderr
    assert not list(tmp_path.iterdir()), "nothing is written"


def test_data_that_are_absent_are_named(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(EXAMPLES)
    checkouts = importlib.import_module("checkouts")
    (tmp_path / "train.txt").write_text("a")
    assert checkouts.files(str(tmp_path), ["train.txt"], flag="--data_dir")[0].is_file()
    with pytest.raises(ValueError, match="no valid.txt: pass the folder"):
        checkouts.files(str(tmp_path), ["train.txt", "valid.txt"], flag="--data_dir")
    with pytest.raises(ValueError, match="--data_dir is None"):
        checkouts.files(None, ["train.txt"], flag="--data_dir")
