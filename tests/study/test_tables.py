"""The tables of decisions: their rows, the words that modify them, and their plans."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import ordering
from experiments.study import tables
from experiments.study.study import arm_of
from experiments.study.tables import ECHO_POLICIES, ORDERS, SYNC_RULES, TABLES
from experiments.tasks import TASKS
from experiments.training import config
from local_opt import Rounds
from tests.words import all_rows, further


def test_every_word_belongs_to_one_table():
    words = [word for table in TABLES.values() for word in (*table, *further(table))]
    assert len(set(words)) == len(words)


@pytest.mark.parametrize(
    "text,decisions,label",
    [
        ("rr", {"order": "rr"}, "D-RR"),
        ("qsr+int8+epoch", {"sync": "qsr+int8+epoch"}, "QSR, int8, to the epoch"),
        ("cd_grab+sketch48+dealt+diffusion+cosine",
         {"order": "cd_grab+sketch48+dealt", "echo": "diffusion+cosine"},
         "CD-GraB, 48 numbers, dealt + error diffusion, cosine p"),
        ("rr+dealt+constant+none", {"order": "rr+dealt", "sync": "constant", "echo": "none"},
         "D-RR, dealt + constant H + no echo"),
    ],
)  # fmt: skip
def test_words_name_decisions(text, decisions, label):
    assert tables.decisions_of(text) == decisions and arm_of(text).label == label
    assert "+".join(decisions.values()) == text
    assert ORDERS["cd_grab+sketch48"] is ORDERS["cd_grab+sketch48"], "programs of it are shared"
    assert ORDERS["cd_grab+sketch48"].sketch == 48 and ORDERS["id_pair+scaled"].scaled == 0.5


@pytest.mark.parametrize(
    "text,message",
    [
        (
            "cats",
            "'cats' is no word: choose of rr, .*, and of .sketchN, .teamN, .scaled, .*; parallel",
        ),
        ("int8", "--sync is int8: 'int8' is not one of parallel, accumulate"),
        ("rr+cd_grab", "--order is rr.cd_grab: 'cd_grab' is no further word: choose of .sketchN"),
        (
            "unzip+sketch4",
            "unzip cannot be sketch4 .--sketch, once.: choose one of id_pair, cd_grab, or leave",
        ),
        ("cd_grab+dealt+chunks", "cd_grab cannot be chunks .--deal, once.: choose one of id_pair"),
    ],
)
def test_invalid_words_are_refused(text, message):
    with pytest.raises(ValueError, match=message):
        tables.decisions_of(text)


def own(total_steps=60, units=8, **fields):
    given = {"schedule": "cosine", "floor": 0.01, "warmup_steps": 5, "h_base": 2} | fields
    recipe = TASKS["digits"](abstract=True).recipe._replace(total_steps=total_steps, **given)
    return config.config_of(recipe, config.Sizes(4, units, 2, 1), seed=0, speed=4)


def test_every_row_builds_its_decision():
    setting = config.OrderSetting(num_units=8, units_per_step=2)
    for name in all_rows(ORDERS):
        assert isinstance(ORDERS[name].make(setting), ordering.Ordering), name
    given = own(growth=1.5, horizon=20)
    assert (given.total_steps, given.echo_factor) == (120, 4), "more steps: echoed ones are shorter"
    for name in all_rows(ECHO_POLICIES):
        policy = ECHO_POLICIES[name].make(given)
        assert policy.total_steps == 120 and policy.online == ECHO_POLICIES[name].online, name
    for name in all_rows(SYNC_RULES):
        rule = SYNC_RULES[name]
        plans = config.plans_of(given, rule, ECHO_POLICIES["diffusion"], rate=0.1)
        plans.check()
        assert plans.sync.syncs_after(119) and plans.sync.total_steps == 120, name
        assert isinstance(rule.rounds(optax.sgd(0.1), axis_name="worker"), Rounds), name
        if "+" not in name:
            online = config.plans_of(given, rule, ECHO_POLICIES["measured"], rate=0.1)
            assert (online.sync is None) == (name == "every_load")


def test_rules_of_other_powers_communicate_as_much_as_qsr():
    given = own(1250, floor=1e-3, warmup_steps=125)
    found = {name: SYNC_RULES[name].plan(given).rounds for name in ("qsr", "inverse", "cubic")}
    assert found["inverse"] == found["cubic"] == found["qsr"] < 2500 / 2


def test_words_of_the_outer_optimizer_and_of_the_longest_round():
    given = own(1250, floor=1e-3, warmup_steps=125)
    qsr, constant = (SYNC_RULES[name].plan(given) for name in ("qsr", "matched"))
    period = int(constant.periods[0])
    assert set(constant.periods[:-1].tolist()) == {period}
    assert constant.rounds <= qsr.rounds < -(-given.total_steps // (period - 1))
    assert SYNC_RULES["qsr+h_max16"].plan(given).periods.max() == 16 < qsr.periods.max()
    label = "QSR, H at most 16, normalized Nesterov 0.7, 0.9"
    assert SYNC_RULES["qsr+h_max16+normalized0.7_0.9"].label == label
    x, ends = jnp.array([[0.0], [2.0]]), []  # two workers, which move by 4 and by 6 per step
    for words in ("constant", "constant+nesterov0.7_0.9", "constant+normalized0.7_0.9"):
        rounds = SYNC_RULES[words].rounds(optax.sgd(1.0), axis_name="worker")
        params, state = x, jax.vmap(rounds.init)(x * 0)
        for _ in range(2):
            updates, state = jax.vmap(rounds.update)(jnp.array([[-4.0], [-6.0]]), state, params)
            params += updates
        ends.append(jax.vmap(rounds.sync, axis_name="worker")(params, state)[0].tolist())
    # The mean is 11 after a start at 0: Nesterov's first step is 0.7 * 1.9 of that.
    np.testing.assert_allclose(np.ravel(ends), np.repeat([11, 14.63, 14.63], 2), rtol=1e-6)


def test_aligned_rules_end_rounds_with_epochs():
    given = own(60, 14, floor=1e-3, growth=1.0, h_base=4, warmup_steps=0)  # epochs of 7 loads
    halves = {*range(7, 120, 7), *range(4, 120, 7), 120}
    ends = SYNC_RULES["constant+half"].plan(given).ends.tolist()
    assert set(ends) < halves and ends[:6] == [4, 11, 14, 18, 21, 25]  # of 4, 8, 12, 16, 20, 24
    for name in ("qsr", "constant"):
        ends = SYNC_RULES[f"{name}+epoch"].plan(given).ends
        assert not (ends[:-1] % 7).any() and len(ends) < SYNC_RULES[name].plan(given).rounds
    # Of an echoed run, seven loads: no round ends before the last use of the seventh.
    plan = ECHO_POLICIES["fixed"].make(given)
    ends = SYNC_RULES["qsr+epoch"].plan(given._replace(fresh=plan.fresh)).ends
    assert given.echo_factor == 4 and not (ends[:-1] % 28).any()
    with pytest.raises(
        ValueError, match="QSR to the half epoch needs an epoch's loads: use a study"
    ):
        SYNC_RULES["qsr+half"].plan(given._replace(loads_per_epoch=None))
