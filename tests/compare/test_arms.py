"""The tables of decisions: their rows, the words that modify them, and their plans."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import ordering
from experiments.compare.arms import arm_of, parsed, row_of
from experiments.compare.rows import TABLES
from experiments.data import TASKS
from experiments.trainer import config
from local_opt import Rounds
from tests.problems import ends_of
from tests.words import all_rows, further


def test_every_word_belongs_to_one_table():
    words = [word for kind, table in TABLES.items() for word in (*table, *further(kind))]
    assert len(set(words)) == len(words)


@pytest.mark.parametrize(
    "text,decisions,label",
    [
        ("rr", {"order": "rr"}, "D-RR"),
        ("qsr+int8+epoch", {"sync": "qsr+int8+epoch"}, "QSR, int8, to the epoch"),
        (
            "cd_grab+sketch48+dealt+diffusion+cosine",
            {"order": "cd_grab+sketch48+dealt", "echo": "diffusion+cosine"},
            "CD-GraB, 48 numbers, dealt + error diffusion, cosine p",
        ),
        (
            "rr+dealt+constant+none",
            {"order": "rr+dealt", "sync": "constant", "echo": "none"},
            "D-RR, dealt + constant H + no echo",
        ),
    ],
)
def test_words_name_decisions(text, decisions, label):
    arm = arm_of(text)
    assert decisions.items() <= arm.words.items() and arm.label == label
    assert {kind: "+".join(words.values()) for kind, words in parsed(text).items()} == decisions
    assert "+".join(decisions.values()) == text
    assert row_of("order", "cd_grab+sketch48") is row_of("order", "cd_grab+sketch48"), (
        "programs of it are shared"
    )
    assert (
        row_of("order", "cd_grab+sketch48").sketch == 48
        and row_of("order", "id_pair+scaled").scaled == 0.5
    )


@pytest.mark.parametrize(
    "text,message",
    [
        ("cats", "'cats', which is no word: choose of --order: rr, .*, and of .sketchN, .teamN"),
        ("int8", "'int8' has a --compress and no --sync: name one of parallel, accumulate"),
        ("rr+cd_grab", "'rr.cd_grab' says --order twice, rr and cd_grab"),
        (
            "unzip+sketch4",
            "unzip cannot be sketch4 .--sketch.: choose one of .*id_pair, .*cd_grab.*, or leave",
        ),
        ("qsr+int8+int4", "says --compress twice, int8 and int4"),
        ("cd_grab+team4", "--team is 4 without a sketch"),
        ("cd_grab+sketch0", "--sketch is 0: pass an integer in the range"),
        ("post_local+switch1", r"--switch is 1: pass a number in \(0, 1\)"),
        ("swap+switch-0.5", r"--switch is -0.5: pass a number in \(0, 1\)"),
        ("qsr+alpha0", r"--alpha is 0: pass a number in \(0, inf\)"),
        ("qsr+switch0.5", "qsr cannot be switch0.5 .--switch.: choose one of post_local, swap"),
    ],
)
def test_invalid_words_are_refused(text, message):
    with pytest.raises(ValueError, match=message):
        arm_of(text)


def setting_of(total_steps=60, units=8, **fields):
    given = {"schedule": "cosine", "floor": 0.01, "warmup_steps": 5, "h_base": 2} | fields
    recipe = TASKS["digits"](abstract=True).recipe._replace(total_steps=total_steps, **given)
    return config.config_of(recipe, config.Sizes(4, units, 2, 1), seed=0, speed=4)


def test_every_row_builds_its_decision():
    setting = config.OrderSetting(num_units=8, units_per_step=2, scores=lambda: np.arange(8.0))
    for name in all_rows("order"):
        assert isinstance(row_of("order", name).make(setting), ordering.Ordering), name
    with pytest.raises(ValueError, match="no data here to score"):
        row_of("order", "scored+saw").make(config.OrderSetting(num_units=8, units_per_step=2))
    given = setting_of(growth=1.5, horizon=20)
    assert (given.total_steps, given.recipe.echo_factor) == (120, 4), "more, shorter steps"
    for name in all_rows("echo"):
        policy = row_of("echo", name).plan(given)
        assert policy.total_steps == 120 and policy.online == row_of("echo", name).online, name
    for name in all_rows("sync"):
        rule = row_of("sync", name)
        plans = given.plans(rule, row_of("echo", "diffusion"), rate=0.1)
        plans.check()
        assert plans.sync.syncs_after(119) and plans.sync.total_steps == 120, name
        assert isinstance(rule.rounds(optax.sgd(0.1), axis_name="worker"), Rounds), name
        if "+" not in name:
            online = given.plans(rule, row_of("echo", "measured"), rate=0.1)
            assert (online.sync is None) == (name == "every_load")


def test_rules_switch_after_a_share_of_the_steps():
    given = setting_of(50, h_base=4)  # 100 steps
    assert row_of("sync", "post_local+switch0.2").label == "post-local, switch at 0.2"
    plan = row_of("sync", "post_local+switch0.2").plan(given)
    assert plan.periods.tolist() == [1] * 20 + [4] * 20
    assert row_of("sync", "post_local").plan(given).periods.tolist()[48:52] == [1, 1, 4, 4]
    plan = row_of("sync", "swap+switch0.2").plan(given)
    assert plan.periods.tolist() == [4] * 5 + [80]


def test_alpha_of_a_rule_is_a_factor_of_growth():
    given, double = (setting_of(600, floor=1e-3, growth=growth) for growth in (2.0, 4.0))
    for name in ("qsr", "matched", "inverse", "cubic"):
        assert row_of("sync", f"{name}+alpha2").plan(given) == row_of("sync", name).plan(double)


def test_rules_of_other_powers_communicate_as_much_as_qsr():
    given = setting_of(1250, floor=1e-3, warmup_steps=125)
    results = {
        name: row_of("sync", name).plan(given).rounds for name in ("qsr", "inverse", "cubic")
    }
    assert results["inverse"] == results["cubic"] == results["qsr"] < 2500 / 2


def test_rules_whose_rounds_are_equal_share_their_programs():
    rounds = {name: row_of("sync", name).rounds for name in ("qsr+int8", "constant+int8", "qsr")}
    assert rounds["qsr+int8"] is rounds["constant+int8"] is not rounds["qsr"]


def test_words_of_the_outer_optimizer():
    given = setting_of(1250, floor=1e-3, warmup_steps=125)
    qsr, constant = (row_of("sync", name).plan(given) for name in ("qsr", "matched"))
    period = int(constant.periods[0])
    assert set(constant.periods[:-1].tolist()) == {period}
    assert constant.rounds <= qsr.rounds < -(-given.total_steps // (period - 1))
    label = "QSR, normalized Nesterov 0.7, 0.9"
    assert row_of("sync", "qsr+normalized0.7_0.9").label == label
    x, ends = jnp.array([[0.0], [2.0]]), []  # two workers, which move by 4 and by 6 per step
    for words in ("constant", "constant+nesterov0.7_0.9", "constant+normalized0.7_0.9"):
        rounds = row_of("sync", words).rounds(optax.sgd(1.0), axis_name="worker")
        params, state = x, jax.vmap(rounds.init)(x * 0)
        for _ in range(2):
            updates, state = jax.vmap(rounds.update)(jnp.array([[-4.0], [-6.0]]), state, params)
            params += updates
        ends.append(jax.vmap(rounds.sync, axis_name="worker")(params, state)[0].tolist())
    # The mean is 11 after a start at 0: Nesterov's first step is 0.7 * 1.9 of that.
    np.testing.assert_allclose(np.ravel(ends), np.repeat([11, 14.63, 14.63], 2), rtol=1e-6)


def test_aligned_rules_end_rounds_with_epochs():
    # Epochs of 7 loads.
    given = setting_of(60, 14, floor=1e-3, growth=1.0, h_base=4, warmup_steps=0)
    halves = {*range(7, 120, 7), *range(4, 120, 7), 120}
    ends = ends_of(row_of("sync", "constant+half").plan(given))
    assert set(ends) < halves and ends[:6] == [4, 11, 14, 18, 21, 25]  # of 4, 8, 12, 16, 20, 24
    for name in ("qsr", "constant"):
        starts = row_of("sync", f"{name}+epoch").plan(given).starts
        assert not (starts % 7).any() and len(starts) < row_of("sync", name).plan(given).rounds
    # In an echoed run no round ends before the last use of the seventh load.
    plan = row_of("echo", "fixed").plan(given)
    starts = row_of("sync", "qsr+epoch").plan(given._replace(fresh=plan.fresh)).starts
    assert given.recipe.echo_factor == 4 and not (starts % 28).any()
    with pytest.raises(ValueError, match="needs an epoch's loads: use a study"):
        row_of("sync", "qsr+half").plan(given._replace(loads_per_epoch=None))
