"""The pages hold what they say: programs run and print what stands below; losses fall."""

import decimal
import pathlib
import re
import sys

import numpy as np
import pytest

import local_opt
from syncopate import command
from tests.cases import mostly_slow
from tests.installed import ran

ROOT = pathlib.Path(__file__).parents[2]
DOCS, README = ROOT / "docs", (ROOT / "README.md").read_text()
USE = sorted((DOCS / "use").glob("*.md"))
PAGES = [DOCS / "start.md", *USE]
BLOCKS = {
    f"{page.stem}-{number}": result
    for page in PAGES
    for number, result in enumerate(
        re.findall(r"```python\n(.*?)```(?:\n\n```text\n(.*?)```)?", page.read_text(), re.S)
    )
}
PROGRAMS = {name: code for name, (code, _) in BLOCKS.items()}
SHOWN = {name: shown for name, (_, shown) in BLOCKS.items()}
NUMBER = r"-?\d+(?:\.\d+)?(?:e[+-]\d+)?"
# Whole loops, with a model, an optimizer and input of their own.
LOOPS = {
    "averages-0", "blocks-0", "blocks-2", "checkpoints-0", "clusters-1",
    "flax_equinox-0", "flax_equinox-1", "flax_equinox-2", "flax_equinox-3", "flax_equinox-4",
    "flax_equinox-5", "input-1", "meshes-0", "meshes-1", "meshes-2", "optax-1", "optax-2",
    "orders-1", "orders-5", "resize-0", "reuse-0", "start-0", "start-1", "together-0",
}  # fmt: skip


def check_imports(code):
    if "equinox" in code:
        pytest.importorskip("equinox")
    if "pyarrow" in code:
        pytest.importorskip("pyarrow")
    if "import grain" in code:
        pytest.importorskip("grain")
    if re.search(r"import .*tensorflow", code):
        pytest.importorskip("tensorflow")


def run(code, capsys):
    """(what a program leaves, losses that it prints: a step and a number, all its text)."""
    check_imports(code)
    names = {}
    exec(compile(code, "docs", "exec"), names)
    printed = capsys.readouterr().out
    losses = [float(x) for x in re.findall(r"^\d+ ([\d.e+-]+)$", printed, re.M)]
    return names, losses, printed


def check_printed(printed, shown):
    """The same words and whole numbers; others differ by at most one in their last digit."""
    assert re.sub(NUMBER, "#", printed) == re.sub(NUMBER, "#", shown)
    for a, b in zip(re.findall(NUMBER, printed), re.findall(NUMBER, shown), strict=True):
        a, b = decimal.Decimal(a), decimal.Decimal(b)
        exponent = b.as_tuple().exponent
        assert abs(a - b) <= (decimal.Decimal(1).scaleb(exponent) if exponent else 0), (a, b)


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_runs_and_the_loss_that_it_prints_falls(name, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code = PROGRAMS[name]
    _, losses, printed = run(code, capsys)
    if re.search(r"print\(.*(loss|value)", code):
        assert len(losses) > 2
        assert losses[-1] < 0.75 * losses[0]
    if SHOWN[name]:
        check_printed(printed, SHOWN[name])


def test_the_program_of_the_readme_is_short_and_prints_what_stands_there(capsys):
    (program,) = re.findall(r"```python\n(.*?)```", README, re.S)
    lines = [line for line in program.split("\n") if line.strip()]
    assert len(lines) <= 23 and max(map(len, lines)) <= 100
    assert f"```python\n{program}```" in (DOCS / "index.md").read_text()
    printed = run(program, capsys)[-1].splitlines()
    assert printed == re.findall(r"`(\w+: \S+ above the lowest)`", README) and len(printed) == 2


LOOP = """
import jax, jax.numpy as jnp, numpy as np, optax, sklearn.datasets
from syncopate import local_opt, ordering

x, y = sklearn.datasets.load_digits(return_X_y=True)
data, lr = (x / 16, y), optax.cosine_decay_schedule(0.5, 400)
entropy = optax.softmax_cross_entropy_with_integer_labels
loss = lambda w, x, y: entropy(x @ w, y).mean()
params, optimizer = jnp.zeros((64, 10)), optax.sgd(lr)
state, rng = optimizer.init(params), np.random.default_rng(0)
rows = rng.integers(1797, size=({loads}, 32))
loader = ((data[0][r], data[1][r]) for r in rows)
"""


@pytest.mark.parametrize("way,loads", [("an order", 400), ("local steps", 100)])
def test_the_diffs_of_the_readme_are_whole(way, loads, capsys):
    """Every line that a loop of your own needs stands there, and what is marked is the change."""
    (diff,) = re.findall(r"```diff\n(.*?)```", README, re.S)
    order, local = re.split(r"^ #.*\n", diff, flags=re.M)[1:]
    shown = order if way == "an order" else local
    before, after = ("".join(re.findall(rf"^[ {m}](.*\n)", shown, re.M)) for m in "-+")
    plain = "".join(re.findall(r"^[ -](.*\n)", order, re.M))
    step = "" if way == "an order" else plain.partition("for ")[0]
    start = LOOP.format(loads=loads)
    run(start + step + before, capsys)
    left, *_ = run(start + step + after, capsys)
    assert left["params"].shape == (64, 10) and left["loss"](left["params"], *left["data"]) < 0.6
    if way == "an order":
        assert left["loader"].epoch == 6  # the last of seven
    else:
        assert left["plan"].rounds < 100 and left["t"] == 399


FROM_THE_WHEEL = """
import ordering, pathlib, sys
files = [getattr(m, "__file__", None) or "" for m in sys.modules.values()]
assert ordering.__file__.startswith({0!r}) and not [f for f in files if f.startswith({1!r})], files
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", [*PROGRAMS, "README"])
def test_a_program_runs_alone_in_a_process_that_has_but_the_package(name, unpacked, tmp_path):
    code = PROGRAMS.get(name) or re.findall("```python\n(.*?)```", README, re.S)[0]
    check_imports(code)
    (tmp_path / "program.py").write_text(code + FROM_THE_WHEEL.format(str(unpacked), f"{ROOT}/"))
    printed = ran([sys.executable, "-P", "program.py"], tmp_path, PYTHONPATH=unpacked)
    if SHOWN.get(name):
        check_printed(printed, SHOWN[name])


DEVICES = ["optax-1", "flax_equinox-1", "flax_equinox-2", "flax_equinox-3"]


@pytest.mark.parametrize("name", mostly_slow(DEVICES, quick=("flax_equinox-1",)))
def test_workers_may_be_devices(name, capsys):
    """By the line in the comment, and by that alone."""
    line = r"^(WORKERS, STEPS = )4, 300  # on devices: WORKERS = (.*)$"
    code = re.sub(line, r"\1\2, 24", PROGRAMS[name], flags=re.M)
    left, (first,), _ = run(code, capsys)
    assert left["WORKERS"].shape["worker"] > 1 and first > 2
    assert float(left["loss"]) < 0.75 * first
    if name == "flax_equinox-1":  # as its page says that the step is read
        assert int(local_opt.mean_over_workers(left["state"].step)) == 24


def test_workers_of_a_balanced_order_may_be_devices(capsys):
    """With the axes that `jax.make_mesh` makes by itself."""
    code = re.sub(r"^(WORKERS = )4  # on devices: ", r"\1", PROGRAMS["flax_equinox-4"], flags=re.M)
    left, losses, _ = run(code, capsys)
    assert left["WORKERS"].shape == {"worker": 4} and losses[-1] < 0.75 * losses[0]
    epoch = np.sort(np.asarray(left["reads"].order_state.current), axis=1)
    np.testing.assert_array_equal(epoch, np.tile(np.arange(448), (4, 1)))


def test_a_loop_that_is_stopped_ends_with_the_same_bits(capsys, tmp_path, monkeypatch):
    """In the middle of an epoch, of a round, and behind its last checkpoint."""
    code = PROGRAMS["checkpoints-0"]
    stopped = code.replace("in reads:\n", "in reads:\n        assert reads.loads < 94, 'stopped'\n")
    for name in ("whole", "stopped"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "whole")
    whole, *_ = run(code, capsys)
    monkeypatch.chdir(tmp_path / "stopped")
    with pytest.raises(AssertionError, match="stopped"):
        run(stopped, capsys)
    again, losses, _ = run(code, capsys)
    assert again["place"].loads == 80 and losses
    np.testing.assert_array_equal(again["run"]["w"], whole["run"]["w"])


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_are_short_and_show_what_they_print(name):
    assert SHOWN[name] or "print(" not in PROGRAMS[name]
    lines = [line for line in PROGRAMS[name].split("\n") if line.strip()]
    assert len(lines) <= (35 if name in LOOPS else 20), len(lines)
    assert max(map(len, lines)) <= 100, max(lines, key=len)
    assert "experiments" not in PROGRAMS[name]


def test_the_page_of_commands_has_them_all():
    page = next(page for page in USE if page.stem == "command_line").read_text()
    cells = re.findall(r"^\| (`.*?) \|", page.split("## Flags")[0], re.M)
    assert sorted(re.findall(r"`(\w+)`", " ".join(cells))) == sorted(command.experiments())


def test_every_page_is_in_the_table_of_the_first():
    first = next(page for page in USE if page.stem == "index").read_text()
    links = set(re.findall(r"\]\((\w+)\.md\)", first))
    assert links == {page.stem for page in USE} - {"index"}
