"""What runs inside code bases of others keeps its promises where they are absent.

Whole runs need checkouts: docs/results/outside.md has the commands.
"""

import importlib
import itertools
import operator
import pathlib
import re
import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import syncopate

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
    plan = echo.ordering.echo.error_diffusion(echo.LOADS_PER_STEP, total_steps=40)
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


@pytest.mark.parametrize("name,most", [("qsr", 10), ("constant", 10), ("cd_grab", 20)])
def test_few_lines_of_nanodo_change_by_public_names(name, most):
    text = (EXAMPLES / "nanodo" / f"{name}.diff").read_text()
    old, new = (re.findall(rf"^[{sign}](?![{sign}]{{2}} )(.*)$", text, re.M) for sign in "-+")
    assert len(new) <= most
    row = f"| [nanodo/{name}.diff](nanodo/{name}.diff) | {len(new)} |"
    assert row in (EXAMPLES / "README.md").read_text()
    sizes = np.array(re.findall(r"^@@ -\d+(?:,(\d))? \+\d+(?:,(\d))? @@$", text, re.M))
    assert [len(old), len(new)] == np.where(sizes == "", "1", sizes).astype(int).sum(0).tolist()
    used = re.findall(r"\b((?:local_opt|ordering)(?:\.\w+)+)", "\n".join(new))
    assert used and max(map(len, new)) <= 100
    for name in used:
        operator.attrgetter(name)(syncopate)


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


def test_slowrun_changes_in_few_lines():
    new = re.findall(r"^\+(?!\+\+ )", (EXAMPLES / "slowrun" / "cd_grab.diff").read_text(), re.M)
    row = f"| [slowrun/cd_grab.diff](slowrun/cd_grab.diff) | {len(new)} |"
    assert row in (EXAMPLES / "README.md").read_text()


def test_slowrun_reads_every_sequence_once_and_observes_each_microbatch(monkeypatch, tmp_path):
    torch = pytest.importorskip("torch")
    monkeypatch.syspath_prepend(EXAMPLES / "slowrun")
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
