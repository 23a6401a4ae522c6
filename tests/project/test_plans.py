"""Plans of both kinds: hashes, saved files, descriptions and decisions."""

import dataclasses
import hashlib
import json
import os
import struct

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import local_opt
from local_opt import SyncPlan
from ordering import echo
from ordering.echo import EchoPlan
from syncopate import plans
from tests import tables

MAKERS = {
    f"{kind}: {name}": make
    for kind, rows in (("rounds", tables.PLANS), ("loads", tables.ECHO_PLANS))
    for name, make in rows.items()
}


def starts_of(plan):
    """What a file has of a plan: the first steps of its rounds, or the steps that load."""
    return getattr(plan, plan._marks)


@pytest.mark.parametrize("name", MAKERS)
def test_a_saved_plan_is_read_back_and_a_changed_file_is_refused(name, tmp_path):
    plan, path = MAKERS[name](41), tmp_path / "plan.json"
    assert isinstance(plan, plans.Plan) and plan.online is False
    assert len(starts_of(plan)) and plan.total_steps == 41
    plan.save(path)
    loaded = type(plan).read(path)
    assert loaded == plan and hash(loaded) == hash(plan) and loaded.rule == plan.rule
    np.testing.assert_array_equal(starts_of(loaded), starts_of(plan))
    assert [p.name for p in tmp_path.iterdir()] == ["plan.json"]
    content = json.loads(path.read_text())
    assert list(content) == ["rule", "total_steps", plan._marks, "digest"]
    for name, value in (("total_steps", 42), (plan._marks, [0]), ("digest", "0" * 64)):
        path.write_text(json.dumps(content | {name: value}))
        with pytest.raises(ValueError, match=f"{NO_PLAN}|{OTHER_PLAN}"):
            type(plan).read(path)


TEN = {SyncPlan: local_opt.constant(4, total_steps=10), EchoPlan: echo.fixed(4, total_steps=10)}
LOADS = {"rule": "fixed", "total_steps": 10, "load_steps": [0, 4, 8], "digest": ""}
OTHER_FILES = [
    "garbage",
    "",
    "[]",
    "null",
    "[" * 100_000,
    '{"starts": [0]}',
    "\ud800",
    json.dumps(LOADS | {"starts": [0], "total_steps": 10**12}),
]
VALUES = ["null", "true", "NaN", "1e400", "-1", "[" * 9000 + "1" + "]" * 9000, "{}"]
# Some become equal to the marks when a cast or an index is careless.
MARKS = [
    "[0.0, 4.0, 8.0]",
    "[false, 4, 8]",
    '["0", "4", "8"]',
    "[0, 8, 4]",
    "[0, 4, 4, 8]",
    "[0, 4, 8, null]",
    "[0, 99]",
    "[1, 2]",
    f"[0, {10**30}]",
    "[4, 2]",
]
NO_PLAN = r"holds no saved plan \(.*\): save it again"
OTHER_PLAN = "does not match its hash: it was changed. Save the plan again"


@pytest.mark.parametrize("kind", [SyncPlan, EchoPlan])
def test_a_file_without_a_plan_is_refused(kind, tmp_path):
    path = tmp_path / "plan.json"
    TEN[kind].save(path)
    saved = {name: json.dumps(value) for name, value in json.loads(path.read_text()).items()}
    whole = path.read_text()
    other = TEN[EchoPlan if kind is SyncPlan else SyncPlan]
    fields = [(name, value) for name in saved for value in VALUES]
    changed = [saved | {name: value} for name, value in fields]
    changed += [saved | {kind._marks: value} for value in MARKS]
    changed += [{n: v for n, v in saved.items() if n != name} for name in saved]
    contents = ["{" + ", ".join(f'"{n}": {v}' for n, v in c.items()) + "}" for c in changed]
    contents += [*OTHER_FILES, whole * 2, *(whole[:cut] for cut in range(len(whole)))]
    for content in contents:
        path.write_text(content, errors="surrogatepass")
        with pytest.raises(ValueError, match=f"plan.json' ({NO_PLAN}|{OTHER_PLAN})") as result:
            kind.read(path)
        assert len(str(result.value)) < 300 + len(str(path))
    other.save(path)
    with pytest.raises(ValueError, match="holds no saved plan"):
        kind.read(path)


def test_an_interrupted_save_leaves_the_old_file(tmp_path, monkeypatch):
    plan, path = local_opt.constant(1, total_steps=5), tmp_path / "plan.json"
    plan.save(path)
    monkeypatch.setattr(os, "replace", lambda old, new: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        local_opt.constant(2, total_steps=5).save(path)
    assert SyncPlan.read(path) == plan and [*tmp_path.iterdir()] == [path]
    with pytest.raises(OSError, match="none"):
        plan.save(tmp_path / "none" / "plan.json")


def test_two_who_save_one_plan_do_not_meet_and_follow_no_link(tmp_path, monkeypatch):
    """The second begins and ends between the first's writing and its renaming."""
    first, second = (local_opt.constant(1, total_steps=t) for t in (5, 6))
    path, other, replace = tmp_path / "plan.json", tmp_path / "other", os.replace
    other.write_text("mine")
    path.symlink_to(other)

    def late(old, new):
        monkeypatch.setattr(os, "replace", replace)
        second.save(path)
        assert SyncPlan.read(path) == second
        replace(old, new)

    monkeypatch.setattr(os, "replace", late)
    first.save(path)
    assert SyncPlan.read(path) == first and {*tmp_path.iterdir()} == {path, other}
    assert other.read_text() == "mine" and not path.is_symlink()


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("total_steps", [1, 400])
def test_description_fits_one_screen(name, total_steps):
    plan = MAKERS[name](total_steps)
    first, second, _, *lines = plan.describe().splitlines()
    assert len(lines) <= 21 and max(map(len, (first, second, *lines))) <= 100
    assert plan.rule in first and plan.digest()[:12] in second
    assert f"{total_steps} steps, {len(starts_of(plan))} {plan._stretches}" in second
    rows = [[float(x) for x in line.split()] for line in lines if "..." not in line]
    if isinstance(plan, SyncPlan):
        assert f"volume {plan.rounds / plan.total_steps:.3%}" in second
        assert f"H from {plan.periods.min()} to {plan.periods.max()}" in second
        assert rows[0] == [0, plan.periods[0]] and rows[-1][1] == plan.periods[-1]
        changes = dict(zip(plan.starts.tolist(), plan.periods.tolist(), strict=True))
        assert all(changes[int(t)] == h for t, h in rows)
        return
    assert f"{plan.loads_per_step:.3%} of the steps load" in second
    assert f"used {plan.uses.min()} to {plan.uses.max()} times" in second
    assert repr(plan) == f"EchoPlan({plan.rule}: {plan.loads} loads in {total_steps} steps)"
    edges = [int(start) for start, _ in rows] + [total_steps]
    assert edges[0] == 0
    for (start, share), end in zip(rows, edges[1:], strict=True):
        assert f"{plan.fresh[int(start) : end].mean():.4f}" == f"{share:.4f}"


KEYS = [jax.random.key(seed) for seed in range(2)]
EQUAL = {
    SyncPlan: [
        local_opt.constant(1, total_steps=9),
        local_opt.constant(1, total_steps=9),
        local_opt.qsr(0.1, total_steps=9, alpha=0.01, h_base=1),
        SyncPlan(list(range(9)), 9),
        *(local_opt.bernoulli(1.0, total_steps=9, key=key) for key in KEYS),
    ],
    EchoPlan: [
        echo.fixed(1, total_steps=9),
        echo.error_diffusion(1.0, total_steps=9),
        *(echo.bernoulli(1.0, total_steps=9, key=key) for key in KEYS),
        EchoPlan([True] * 9),
    ],
}
OTHERS = {  # the last has the same loads and one more step
    SyncPlan: [
        local_opt.constant(1, total_steps=8),
        local_opt.constant(1, total_steps=10),
        local_opt.constant(2, total_steps=9),
    ],
    EchoPlan: [echo.fixed(e, total_steps=t) for e, t in ((1, 8), (1, 10), (2, 9), (2, 10))],
}


@pytest.mark.parametrize("kind", EQUAL)
def test_plans_with_equal_marks_are_equal(kind):
    first, others = EQUAL[kind][0], OTHERS[kind]
    assert len({plan.digest() for plan in EQUAL[kind]}) == 1 and len(set(EQUAL[kind])) == 1
    # The same on every machine: little-endian int64.
    assert first.digest() == hashlib.sha256(struct.pack("<10q", *range(9), 9)).hexdigest()
    assert len({plan.digest() for plan in (*others, first)}) == len(others) + 1
    assert first != others[0] and first != first.rule


def test_plans_of_different_kinds_are_never_equal():
    loads = echo.fixed(3, total_steps=41)
    rounds = SyncPlan(loads.load_steps, 41)
    assert rounds.digest() == loads.digest() and rounds != loads and loads != rounds


@pytest.mark.parametrize("kind,given", [(SyncPlan, [0, 4]), (EchoPlan, [True, False, False])])
def test_a_plan_is_immutable(kind, given):
    marks = np.array(given)
    plan = kind(marks, 10) if kind is SyncPlan else kind(marks)
    name = "starts" if kind is SyncPlan else "fresh"
    marks[1] = 1 + marks[0]
    assert getattr(plan, name).tolist() == given
    with pytest.raises(ValueError, match="read-only"):
        getattr(plan, name)[1] = 5
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(plan, name, marks)


@given(st.data())
def test_plans_and_the_measured_policy_decide_through_one_method(data):
    total_steps = data.draw(st.integers(1, 20))
    fresh = [
        True,
        *data.draw(st.lists(st.booleans(), min_size=total_steps - 1, max_size=total_steps - 1)),
    ]
    plan = EchoPlan(fresh)
    policy = echo.adaptive(total_steps=total_steps, max_factor=99, decided=fresh)
    assert (plan.online, policy.online) == (False, True)
    assert plan.total_steps == policy.total_steps == total_steps
    for step in range(total_steps + 1):
        assert plan.place(step) == policy.place(step)
        assert plan.first_load(step) == policy.first_load(step)
    for step in range(total_steps):  # decided already: `ready` is not needed
        asked = dict(uses=1, ready=None)
        assert plan.decide(step, **asked) is policy.decide(step, **asked) is fresh[step]
    with pytest.raises(ValueError, match="plan is a SyncPlan"):
        echo.repeat([], local_opt.constant(1, total_steps=3))
