"""Parsing the text of compiled programs, on small samples."""

import pytest

from experiments.study.cost import collectives_of, cycles_of, result_bytes, shortage

# As libtpu prints, with parameters left out: a loop with a reduction, and a gather in two halves.
TPU = """HloModule jit_step, is_scheduled=true, input_output_alias={ {0}: (0, {}, may-alias) }

%fused (p: f32[4,5]) -> f32[4,5] {
  ROOT %n = f32[4,5]{1,0} negate(%p), backend_config={"window_config":{"estimated_cycles":"999"}}
}

%body (state: (s32[], f32[4,5], /*index=2*/f32[])) -> (s32[], f32[4,5], f32[]) {
  %psum = (f32[4,5]{1,0:T(4,128)S(1)}, bf16[3]{0}) all-reduce(%x, %x), to_apply=%sum
  %g = f32[4,5]{1,0:T(4,128)S(1)} fusion(%x), kind=kLoop, calls=%fused, backend_config={"window_config":{"estimated_cycles":"100"}}
  ROOT %out = (s32[]{:T(128)}, f32[4,5]{1,0}, f32[]{:T(128)}) tuple(%i, %g, %y)
}

%moves (m: f32[8]) -> f32[8] {
  ROOT %moved = f32[8]{0} all-to-all(%m), dimensions={0}
}

%begin (q: f32[1,2]) -> (f32[4,2], u32[]) {
  %all-gather.8 = f32[4,2]{1,0:T(1,128)} all-gather(%q), dimensions={0}
  ROOT %custom-call.12 = (f32[4,2]{1,0}, u32[]{:S(2)}) custom-call(%all-gather.8), custom_call_target="AsyncCollectiveStart"
}

%async_collective_fusion.1 (r: f32[1,2]) -> f32[4,2] {
  %all-gather.10 = f32[4,2]{1,0:T(1,128)} all-gather(%r), dimensions={0}
  ROOT %product = f32[4,2]{1,0} convolution(%all-gather.10, %r)
}

%finish (v: f32[1,2]) -> f32[4,2] {
  %all-gather.12 = f32[4,2]{1,0:T(1,128)} all-gather(%v), dimensions={0}
  ROOT %custom-call.14 = f32[4,2]{1,0} custom-call(%all-gather.12), custom_call_target="AsyncCollectiveDone"
}

%scatters (z: f32[8]) -> f32[2] {
  %all-reduce.3 = f32[8]{0} all-reduce(%z), to_apply=%sum
  ROOT %slice = f32[2]{0} slice(%all-reduce.3), slice={[0:2]}
}

ENTRY %main (arg: (s32[], f32[4,5], f32[])) -> f32[8] {
  %gather = (f32[2]{0}, f32[8]{0}) all-gather-start(%part), dimensions={0}
  %w = (s32[]{:T(128)}, f32[4,5]{1,0}, f32[]{:T(128)}) while(%arg), condition=%condition, body=%body, metadata={op_name="jit(step)/while"}
  %gathered = f32[8]{0} all-gather-done(%gather), backend_config={"estimated_cycles":"3"}
  %named = f32[8]{0} all-gather(%part), frontend_attributes={async_collective_name="all-gather-start"}
  %start = ((f32[8]{0}), f32[8]{0}, u32[]) async-start(%gathered), calls=%moves
  %fusion.1 = (f32[4,2]{1,0}, u32[]{:S(2)}) fusion(%part), kind=kCustom, calls=%begin
  %fusion.2 = f32[4,2]{1,0} fusion(%fusion.1), kind=kCustom, calls=%async_collective_fusion.1, backend_config={"estimated_cycles":"5"}
  %fusion.3 = f32[4,2]{1,0} fusion(%fusion.2), kind=kCustom, calls=%finish
  %fusion.4 = f32[2]{0} fusion(%gathered), kind=kCustom, calls=%scatters
  ROOT %done = f32[8]{0} async-done(%start)
}
"""  # noqa: E501

# As XLA prints for CUDA: pairs everywhere, and whether they block beside them.
CUDA = """HloModule jit_step, is_scheduled=true

%body (state: (s32[], f32[8])) -> (s32[], f32[8]) {
  %all-reduce-start = f32[8]{0} all-reduce-start(%x), to_apply=%sum, backend_config={"collective_backend_config":{"is_sync":false}}
  %g = f32[8]{0} fusion(%x), kind=kLoop, calls=%fused
  %all-reduce-done = f32[8]{0} all-reduce-done(%all-reduce-start)
}

ENTRY %main (a: f32[8]) -> f32[2] {
  %w = (s32[], f32[8]{0}) while(%a), condition=%less, body=%body, metadata={op_name="signs"}
  %all-to-all-start = ((f32[8]{0}), f32[8]{0}) all-to-all-start(%a), backend_config={"collective_backend_config":{"is_sync":true}}
  ROOT %all-to-all-done = f32[8]{0} all-to-all-done(%all-to-all-start), backend_config={"collective_backend_config":{"is_sync":false}}
}
"""  # noqa: E501


@pytest.mark.parametrize("text,expected", [
    (TPU, [
        ("body", "all-reduce", 4 * 5 * 4 + 3 * 2, False),  # in a loop
        ("moves", "all-to-all", 32, True),  # in a computation of its own
        ("finish", "all-gather", 32, True),  # in three fusions
        ("scatters", "all-reduce", 32, False),  # in one
        ("main", "all-gather", 32, True),  # two halves are one
        ("main", "all-gather", 32, False),  # was one, as its name remembers
    ]),
    (CUDA, [("body", "all-reduce", 32, True), ("main", "all-to-all", 32, False)]),
])  # fmt: skip
def test_every_collective_counts_once(text, expected):
    found = collectives_of(text)
    assert [(one.where, one.kind, one.bytes, one.asynchronous) for one in found] == expected


def test_cycles_count_what_runs_and_a_fusion_counts_once():
    """One turn of the loop, the end of a gather, and what runs during one."""
    assert cycles_of(TPU) == 100 + 3 + 5
    assert cycles_of(CUDA) is None


def test_bytes_of_a_type():
    assert result_bytes("f32[64,10]{1,0:T(8,128)S(1)}") == 2560
    assert result_bytes("(u32[]{:S(2)}, pred[7]{0}, s4[3], f8e4m3fn[2,2], token[])") == 17


@pytest.mark.parametrize("message,needed,available", [
    ("RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO temporaries "
     "(800.00G) exceeds available HBM (15.75G).", 800.0, 15.75),
    ("Ran out of memory in memory space hbm. Used 22.50G of 15.75G hbm. Exceeded hbm capacity by "
     "6.75G.", 22.5, 15.75),
])  # fmt: skip
def test_a_memory_shortage_is_parsed_from_the_compiler_s_message(message, needed, available):
    assert shortage(message) == (needed * 2**30, available * 2**30)
    assert shortage("INTERNAL: something else") is None
