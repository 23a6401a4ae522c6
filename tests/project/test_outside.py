"""What runs inside code bases of others keeps its promises where they are absent.

Whole runs need checkouts: docs/results/outside.md has the commands.
"""

import importlib
import operator
import pathlib
import re
import subprocess
import sys

import numpy as np
import pytest

import syncopate

EXAMPLES = pathlib.Path(__file__).resolve().parents[2] / "examples"


@pytest.mark.parametrize("name,most", [
    ("nanodo/qsr", 10), ("nanodo/constant", 10), ("nanodo/cd_grab", 20), ("slowrun/cd_grab", 4),
])  # fmt: skip
def test_few_lines_change_by_public_names(name, most):
    text = (EXAMPLES / f"{name}.diff").read_text()
    old, new = (re.findall(rf"^[{sign}](?![{sign}]{{2}} )(.*)$", text, re.M) for sign in "-+")
    assert len(new) <= most
    row = f"| [{name}.diff]({name}.diff) | {len(new)} |"
    assert row in (EXAMPLES / "README.md").read_text()
    sizes = np.array(re.findall(r"^@@ -\d+(?:,(\d))? \+\d+(?:,(\d))? @@$", text, re.M))
    assert [len(old), len(new)] == np.where(sizes == "", "1", sizes).astype(int).sum(0).tolist()
    used = re.findall(r"\b((?:local_opt|ordering)(?:\.\w+)+)", "\n".join(new))
    assert used or "balanced" in new[0]
    for name in used:
        operator.attrgetter(name)(syncopate)


@pytest.mark.parametrize("flags,says", [
    ([], "--nanodo is None.* no nanodo/train.py: `git clone https://github.com/google-deepmind/n"),
    (["--nanodo=."], "--data_dir is None, .* no train.txt and no valid.txt: pass the folder"),
])  # fmt: skip
def test_a_script_without_what_it_needs_says_what_to_fetch(flags, says, tmp_path):
    (tmp_path / "nanodo").mkdir()
    (tmp_path / "nanodo" / "train.py").touch()
    command = [sys.executable, str(EXAMPLES / "nanodo" / "run.py"), *flags]
    found = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert found.returncode == 1 and re.search(f"ValueError: {says}", found.stderr)
    assert len([*tmp_path.rglob("*")]) == 2, "nothing is written"


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
