"""Transfers in a schedule, and how long a program waits for them."""

import pytest

from benchmarks import overlap
from benchmarks.overlap import HERTZ, Moment, moments_of, waited_for
from experiments.study.cost import LIBTPU
from tests.compiled_runs import compiled_by

SEND = 'send(%x), channel_id=2, frontend_attributes={_rendezvous="a_0"}'
RECV = 'recv(%token), channel_id=1, frontend_attributes={_rendezvous="a_0"}'
COST = 'backend_config={"estimated_cycles":"%d"}'
TEXT = f"""HloModule two_slices

%cond (p: (u32[])) -> pred[] {{
  %five = u32[]{{:T(128)}} constant(5)
  ROOT %less = pred[] compare(%i, %five), direction=LT
}}

%body (p: (u32[])) -> (u32[]) {{
  ROOT %next = (u32[]) fusion(%p), {COST % 7}
}}

ENTRY %main (x: f32[3]) -> f32[3] {{
  %first = f32[3]{{0}} fusion(%x), {COST % 100}
  %send = (f32[3]{{0}}, u32[], token[]) {SEND}
  %recv = (f32[3]{{0}}, u32[], token[]) {RECV}
  %loop = (u32[]) while(%start), condition=%cond, body=%body
  %recv-done = (f32[3]{{0}}, token[]) recv-done(%recv), channel_id=1
  ROOT %last = f32[3]{{0}} fusion(%y), {COST % 1}
}}
"""


def test_a_schedule_tells_what_is_computed_between_a_send_and_its_arrival():
    """With all turns of a loop."""
    sent, arrived = Moment(True, "a_0", 12, 100), Moment(False, "a_0", 0, 135)
    assert moments_of(TEXT) == ([sent, arrived], 136)


def test_transfers_take_turns_and_computation_hides_them():
    """Of two seconds each: the second begins as the first ends, and is waited for at second 3."""
    at = [int(HERTZ * second) for second in (0, 1, 3, 3)]
    moments = [
        Moment(True, "a", 20, at[0]), Moment(True, "b", 20, at[1]),
        Moment(False, "a", 0, at[2]), Moment(False, "b", 0, at[3]),
    ]  # fmt: skip
    assert waited_for(moments, 10.0) == pytest.approx((4.0, 1.0))
    assert waited_for(moments, 5.0) == pytest.approx((8.0, 5.0))
    assert waited_for(moments, 1e9)[1] == 0


@compiled_by(LIBTPU)
@pytest.mark.parametrize("wire,hops", [(None, 1), ("int4", 2)])
def test_a_step_is_computed_while_a_fragment_travels_between_slices(wire, hops, monkeypatch):
    """A GPT of three little layers, whose parameters are split over the chips of a slice."""
    monkeypatch.setitem(overlap.MODELS, "little", {"width": 256, "depth": 3, "heads": 2})
    for name, value in {"CHIPS": (2, 2), "BATCH": 4, "CONTEXT": 256}.items():
        monkeypatch.setattr(overlap, name, value)
    text, size, sent, _ = overlap.compiled("little", wire, True)
    moments, cycles = moments_of(text)
    assert sent < size and sum(m.begins for m in moments) == sum(not m.begins for m in moments)
    begun = {m.transfer: m.cycles for m in moments if m.begins}
    between = [m.cycles - begun[m.transfer] for m in moments if not m.begins]
    assert max(between) > 0.5 * cycles, "nearly the whole step"
    whole = moments_of(overlap.compiled("little", None, False)[0])
    least = sum(m.bytes for m in whole[0])
    assert sum(m.bytes for m in moments) < least, "a fragment alone"
    assert len(begun) >= hops
