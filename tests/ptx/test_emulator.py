"""The PTX emulator: it detects faults, races and unsupported PTX, and computes what the PTX ISA defines."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from kernels.attention_rows import AttentionShape
from kernels.triton.products.linear import linear
from tests.support.kernel_cases import normal
from tests.support.kernel_tolerances import assert_near
from tests.support.ptx.attention_batch import AttentionBatch
from tests.support.ptx.block import FORWARD, LOCKSTEP, REVERSE
from tests.support.ptx.card import EmulatedCard
from tests.support.ptx.memory import Fault
from tests.support.ptx.program import UnknownPtx

ORDERS = pytest.mark.parametrize("order", [LOCKSTEP, FORWARD, REVERSE])
KERNEL = """
.version 8.7
.target sm_90a
.extern .shared .align 16 .b8 global_smem[];
.visible .entry k(.param .u64 k_param_0, .param .u64 k_param_1)
.reqntid {threads}
{{
    .reg .pred %p<9>; .reg .b16 %rs<9>; .reg .b32 %r<99>; .reg .b64 %rd<9>;
    ld.param.b64 %rd1, [k_param_0];
    ld.param.b64 %rd2, [k_param_1];
    mov.u32 %r1, %tid.x;
    mul.wide.u32 %rd3, %r1, 4;
    add.s64 %rd4, %rd1, %rd3;
    add.s64 %rd5, %rd2, %rd3;
    shl.b32 %r2, %r1, 2;
    {body}
    ret;
}}
"""
"""%rd4 and %rd5: a thread's own words of 4 bytes in the first and in the second tensor; %r2: its own in shared memory."""


def execute(card: EmulatedCard, body: str, given: torch.Tensor, *, threads: int = 64, early: bool = False) -> torch.Tensor:
    """Execute `body` in a kernel; returns the second tensor, into which it writes 32-bit integers."""
    out = torch.full((threads,), -1, dtype=torch.int32)
    card.execute(KERNEL.format(threads=threads, body=body), [given, out], (1, 1, 1), 4 * threads, early=early)
    return out


def thread_numbers(count: int = 64) -> torch.Tensor:
    return torch.arange(100, 100 + count, dtype=torch.int32)


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ("brev.b32 %r3, %r1;", "the instruction brev in: brev.b32"),
        ("tex.1d.v4.f32.s32 {%r1, %r2, %r3, %r4}, [%rd1, {%r1}];", "in: tex.1d"),
        ("add.sat.s32 %r3, %r1, %r2;", ".sat of add"),
        ("bar.sync 1, 32;", "barrier 0"),
        ("mov.u32 %r3, %clock;", "%clock"),
    ],
)
def test_unsupported_ptx_is_refused_by_name(card: EmulatedCard, body: str, named: str) -> None:
    with pytest.raises(UnknownPtx, match=named):
        execute(card, body, thread_numbers())


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("ld.global.b32 %r3, [%rd4+4];", "4 bytes that end 4 behind a tensor of 256"),
        ("ld.global.b32 %r3, [%rd4+-4];", "4 bytes that begin 4 before a tensor"),
        ("st.global.b32 [%rd5+4], %r1;", "behind a tensor"),
        ("prefetch.global.L2 [%rd4+4];", "behind a tensor"),
        ("ld.global.v2.b32 {%r3, %r4}, [%rd4];", "misaligned"),
        ("st.global.b32 [%rd5+2], %r1;", "misaligned"),
        ("ld.shared.b32 %r4, [%r2+4];", "out of bounds of shared memory, which has 256 bytes"),
        ("st.shared.v2.b32 [%r2], {%r1, %r1};", "misaligned in shared memory"),
        ("mov.u64 %rd6, 0; ld.global.b32 %r3, [%rd6];", "before a tensor"),
        ("cp.async.ca.shared.global [%r2], [%rd4+4], 0x4;", "behind a tensor"),
        ("add.f32 %r3, %rd4, %rd4;", "has 64 bits, 32 are read"),
        ("and.b32 %r3, %r2, 0; st.shared.b32 [%r3], %r1;", "different values at one place"),
    ],
)
def test_invalid_accesses_are_faults(card: EmulatedCard, body: str, message: str) -> None:
    with pytest.raises(Fault, match=message):
        execute(card, body, thread_numbers())


def test_predicated_and_empty_accesses_are_not_checked(card: EmulatedCard) -> None:
    body = """
        setp.lt.u32 %p1, %r1, 63;
        @%p1 ld.global.b32 %r3, [%rd4+4];
        selp.b32 %r4, 4, 0, %p1;
        cp.async.ca.shared.global [%r2], [%rd4+4], 0x4, %r4;
        cp.async.wait_all;
        ld.shared.b32 %r5, [%r2];
        st.global.b32 [%rd5], %r5;
    """
    assert execute(card, body, thread_numbers()).tolist() == [*range(101, 164), 0]


def test_nan_and_infinity_raise_no_exception(card: EmulatedCard) -> None:
    """Signalling NaN included, which uninitialised memory may contain."""
    signalling, largest = 0x7FA00000, 0x7F7FFFFF
    body = """
        ld.global.b32 %r3, [%rd4];
        add.f32 %r4, %r3, 0f00000000;
        mul.f32 %r5, %r3, 0f40000000;
        sub.f32 %r6, %r5, %r5;
        setp.nan.f32 %p1, %r4, %r6;
        selp.b32 %r7, 1, 0, %p1;
        st.global.b32 [%rd5], %r7;
    """
    given = torch.tensor([signalling, largest, 0, 0] * 16, dtype=torch.int32)
    assert execute(card, body, given).tolist() == [1, 1, 0, 0] * 16


COPY = """
    cp.async.ca.shared.global [%r2], [%rd4], 0x4;
    cp.async.commit_group;
    cp.async.wait_group 0;
    bar.sync 0;
    xor.b32 %r3, %r2, 252;
    ld.shared.b32 %r4, [%r3];
    bar.sync 0;
    st.shared.b32 [%r2], %r4;
    st.global.b32 [%rd5], %r4;
"""
"""Each thread reads what the opposite thread has copied, and then overwrites what that thread read."""


@ORDERS
def test_async_copies_with_waits_and_barriers_are_correct_in_every_order(card: EmulatedCard, order: str) -> None:
    card.order = order
    assert execute(card, COPY, thread_numbers()).tolist() == thread_numbers().flip(0).tolist()


@ORDERS
@pytest.mark.parametrize(
    ("removed", "fault"),
    [
        ("cp.async.wait_group 0;", "reads what a copy is still under way to"),
        ("cp.async.commit_group;", "reads what a copy is still under way to"),
        ("wait_group 0;\n    bar.sync 0;", "what another warp (wrote|reads), without a barrier"),
        ("[%r3];\n    bar.sync 0;", "what another warp (wrote|reads), without a barrier"),
    ],
)
def test_a_missing_wait_or_barrier_is_detected(card: EmulatedCard, order: str, removed: str, fault: str) -> None:
    card.order = order
    assert removed in COPY
    kept = removed.replace("bar.sync 0;", "") if "\n" in removed else ""
    with pytest.raises(Fault, match=fault):
        execute(card, COPY.replace(removed, kept), thread_numbers())


@ORDERS
def test_a_missing_barrier_between_threads_of_a_warp_is_detected(card: EmulatedCard, order: str) -> None:
    card.order = order
    write, wait = "st.shared.b32 [%r2], %r1;", "bar.warp.sync -1;"
    read = "xor.b32 %r3, %r2, 124; ld.shared.b32 %r4, [%r3];"
    given = execute(card, write + wait + read + "st.global.b32 [%rd5], %r4;", thread_numbers())
    assert given.tolist() == [*range(31, -1, -1), *range(63, 31, -1)]
    for body in (
        write + read,
        read + "add.s32 %r5, %r1, 1; st.shared.b32 [%r2], %r5;",
        write + wait + read + write.replace("%r1", "%r4"),
    ):
        with pytest.raises(Fault, match=r"what another thread of its warp (wrote|reads), without a barrier"):
            execute(card, body, thread_numbers())


def test_an_async_copy_reads_its_source_when_it_is_waited_for(card: EmulatedCard) -> None:
    """The emulator copies as late as possible, so a source overwritten before the wait is read with its new content."""
    body = COPY.replace("cp.async.wait_group", "st.global.b32 [%rd4], %r1; cp.async.wait_group")
    assert execute(card, body, thread_numbers()).tolist() == list(range(63, -1, -1))


ARRIVAL = """
    st.global.b32 [%rd5], %r1;
    bar.sync 0;
    setp.eq.u32 %p1, %r1, 0;
    @%p1 atom.global.gpu.acq_rel.add.u32 %r3, [%rd1], 1;
"""
"""Every thread stores; then one thread counts the arrival of its block, after which another block may read the stores."""


@pytest.mark.parametrize("order", [LOCKSTEP, REVERSE])
def test_an_arrival_that_is_not_ordered_after_all_stores_is_detected(card: EmulatedCard, order: str) -> None:
    """Not in forward order: there the counting warp runs first, and stores of the others may be meant to follow it."""
    card.order = order
    given = thread_numbers()
    assert execute(card, ARRIVAL, given).tolist() == [*range(64)]
    assert given[0] == 101
    with pytest.raises(Fault, match="releases what another warp stored, without a barrier"):
        execute(card, ARRIVAL.replace("bar.sync 0;", ""), given)
    execute(card, ARRIVAL.replace("bar.sync 0;", "").replace("acq_rel", "relaxed"), given)  # releases nothing


@ORDERS
def test_a_barrier_that_not_all_threads_reach_is_a_fault(card: EmulatedCard, order: str) -> None:
    card.order = order
    with pytest.raises(Fault, match="not all threads come to"):
        execute(card, "setp.lt.u32 %p1, %r1, 32; @%p1 bar.sync 0;", thread_numbers())


def test_an_early_launched_kernel_must_wait_before_it_touches_memory(card: EmulatedCard) -> None:
    store, wait = "st.global.b32 [%rd5], %r1;", "griddepcontrol.wait;"
    weights = "ld.global.L1::evict_first.b32 %r3, [%rd4];"
    assert execute(card, weights + wait + store, thread_numbers(), early=True).tolist() == [*range(64)]
    for body in (store + wait, "ld.global.b32 %r3, [%rd4];" + wait):
        with pytest.raises(Fault, match=r"before griddepcontrol.wait"):
            execute(card, body, thread_numbers(), early=True)
    with pytest.raises(Fault, match="never waits"):
        execute(card, "", thread_numbers(), early=True)


@pytest.mark.parametrize("policy", ["evict_first", "evict_last"])
def test_an_early_read_of_what_the_preceding_kernel_stores_is_detected(card: EmulatedCard, policy: str) -> None:
    given, card.launches_back_to_back = thread_numbers(), True
    early, wait = f"ld.global.L1::{policy}.b32 %r3, [%rd4];", "griddepcontrol.wait;"
    copy = wait + "st.global.b32 [%rd5], %r3;"
    written = execute(card, "st.global.b32 [%rd4], %r1; st.global.b32 [%rd5], %r1;", given)
    with pytest.raises(Fault, match="the kernel in front has stored"):
        execute(card, early + copy, given, early=True)
    execute(card, "st.global.b32 [%rd5], %r1;", given)  # another one in between has ended
    assert execute(card, early + copy, given, early=True).tolist() == written.tolist()
    assert execute(card, wait + early + copy, given, early=True).tolist() == written.tolist()


PRODUCT = """
    mov.b32 %r20, 0; mov.b32 %r21, 0; mov.b32 %r22, 0; mov.b32 %r23, 0;
    mov.b64 %rd6, 0x0000000800080000;
    {before}
    wgmma.fence.sync.aligned;
    wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16
        {{%r10, %r11, %r12, %r13}}, {{%r20, %r21, %r22, %r23}}, %rd6, 0, 1, 1, 0;
    wgmma.commit_group.sync.aligned;
    {behind}
    wgmma.wait_group.sync.aligned 0;
    st.global.b32 [%rd5], %r13;
"""
"""Zeros in registers times the matrix at the beginning of shared memory."""


def test_a_wgmma_product_of_zeros_is_zero(card: EmulatedCard) -> None:
    before = "st.shared.b32 [%r2], %r1; fence.proxy.async.shared::cta; bar.sync 0;"
    assert not execute(card, PRODUCT.format(before=before, behind=""), thread_numbers(), threads=128).any()


@pytest.mark.parametrize(
    ("before", "behind", "fault"),
    [
        ("st.shared.b32 [%r2], %r1; bar.sync 0;", "", "stored behind the last fence"),
        ("st.shared.b32 [%r2], %r1; fence.proxy.async.shared::cta;", "", "what another warp wrote"),
        ("", "st.shared.b32 [%r2], %r1;", "writes what wgmma is still reading"),
        ("", "cp.async.ca.shared.global [%r2], [%rd4], 0x4;", "writes what wgmma is still reading"),
        ("", "mov.b32 %r20, 1;", "%r20 is written while wgmma is still using it"),
        ("", "mov.b32 %r10, 1;", "%r10 is written while wgmma is still using it"),
        ("", "add.f32 %r30, %r13, %r13;", "%r13 is read while wgmma is still writing it"),
    ],
)
def test_registers_and_memory_in_use_by_wgmma_must_not_be_touched(
    card: EmulatedCard, before: str, behind: str, fault: str
) -> None:
    with pytest.raises(Fault, match=fault):
        execute(card, PRODUCT.format(before=before, behind=behind), thread_numbers(128), threads=128)


def test_diverged_threads_of_a_warp_reconverge(card: EmulatedCard) -> None:
    """Thread t runs t mod 5 iterations; then its warp computes a sum."""
    body = """
        rem.u32 %r3, %r1, 5;
        mov.b32 %r4, 0;
        $L: setp.ge.u32 %p1, %r4, %r3;
        @%p1 bra $END;
        add.s32 %r4, %r4, 1;
        bra.uni $L;
        $END: redux.sync.add.s32 %r5, %r4, -1;
        st.global.b32 [%rd5], %r5;
    """
    warps = [sum(thread % 5 for thread in range(first, first + 32)) for first in (0, 32)]
    assert execute(card, body, thread_numbers()).tolist() == [warps[0]] * 32 + [warps[1]] * 32


def bits_as_int(value: Any, dtype: torch.dtype) -> int:
    """The bits of `value` in `dtype` as a signed integer."""
    return int(torch.tensor([value], dtype=dtype).view(torch.int32 if dtype.itemsize == 4 else torch.int16)[0])


RESULTS: list[tuple[str, int]] = [
    ("lop3.b32 %r9, 0x0F0F0F0F, 0x00FF00FF, 0x33333333, 0xEA;", (0x0F0F0F0F & 0x00FF00FF) | 0x33333333),
    ("prmt.b32 %r9, 0x33221180, 0x77665544, 0x8710;", 0xFF771180 - 2**32),
    ("bfe.s32 %r9, 0x000000F0, 4, 4;", -1),
    ("bfe.u32 %r9, -1, 28, 4;", 15),
    ("bfi.b32 %r9, 0xFF, 0x11111111, 8, 4;", 0x11111F11),
    ("shf.l.wrap.b32 %r9, 0x80000001, 0x00000002, 33;", 5),
    ("shl.b32 %r9, 1, 32;", 0),
    ("shr.s32 %r9, -8, 40;", -1),
    ("popc.b32 %r9, 0xF0F0;", 8),
    ("clz.b32 %r9, 0x00010000;", 15),
    ("mul.hi.s32 %r9, -3, 0x40000000;", -1),
    ("mad.lo.s32 %r9, 0x10000, 0x10000, 7;", 7),
    ("div.s32 %r9, -7, 2;", -3),
    ("rem.s32 %r9, -7, 2;", -1),
    ("min.u32 %r9, -1, 5;", 5),
    ("cvt.rn.f32.s32 %r9, -3;", bits_as_int(-3.0, torch.float32)),
    ("cvt.rzi.s32.f32 %r9, 0fC0600000;", -3),
    ("cvt.rzi.s32.f32 %r9, 0f7F800000;", 2**31 - 1),
    ("cvt.rn.bf16x2.f32 %r9, 0f3F808000, 0f3F818000;", (0x3F80 << 16) | 0x3F82),
    ("cvt.rn.satfinite.e4m3x2.f32 %rs1, 0f7F800000, 0f3F800000; cvt.u32.u16 %r9, %rs1;", 0x7E38),
    ("mov.b16 %rs1, 0x7E38; cvt.rn.f16x2.e4m3x2 %r9, %rs1;", (0x5F00 << 16) | 0x3C00),
    ("max.f32 %r9, 0f7FC00000, 0f3F800000;", bits_as_int(1.0, torch.float32)),
    ("min.NaN.f32 %r8, 0f7FC00000, 0f3F800000; setp.nan.f32 %p1, %r8, %r8; selp.b32 %r9, 1, 2, %p1;", 1),
    ("min.xorsign.abs.f32 %r9, 0fC0400000, 0f40000000;", bits_as_int(-2.0, torch.float32)),
    ("add.f32 %r9, 0f3F800000, 0f33800000;", bits_as_int(1.0, torch.float32)),
    ("fma.rn.f32 %r9, 0f3F800001, 0f3F800001, 0fBF800002;", bits_as_int(2.0**-46, torch.float32)),
    ("mul.ftz.f32 %r9, 0f00000001, 0f4B000000;", 0),
    ("ex2.approx.ftz.f32 %r9, 0fC0000000;", bits_as_int(0.25, torch.float32)),
    ("sub.bf16x2 %r9, 0x43004380, 0x43004300;", bits_as_int(128.0, torch.bfloat16)),
    ("setp.lt.f32 %p1, 0f7FC00000, 0f3F800000; selp.b32 %r9, 1, 2, %p1;", 2),
    ("setp.ltu.f32 %p1, 0f7FC00000, 0f3F800000; selp.b32 %r9, 1, 2, %p1;", 1),
    ("setp.gt.and.u32 %p1, -1, 1, 0; selp.b32 %r9, 1, 2, %p1;", 2),
    ("mov.b32 {%rs1, %rs2}, 0x00070009; mov.b32 %r9, {%rs2, %rs1};", 0x00090007),
    ("shfl.sync.bfly.b32 %r8, %r1, 3, 31, -1; shfl.sync.idx.b32 %r9, %r8, 4, 31, -1;", 7),
    ("shfl.sync.up.b32 %r8, %r1, 1, 0, -1; redux.sync.min.s32 %r9, %r8, -1;", 0),
]


@pytest.mark.parametrize(("body", "expected"), RESULTS)
def test_instructions_compute_what_the_isa_defines(card: EmulatedCard, body: str, expected: int) -> None:
    made = execute(card, body + " st.global.b32 [%rd5], %r9;", thread_numbers(32), threads=32)
    assert int(made[0]) == expected


def test_an_atomic_sum_counts_every_thread(card: EmulatedCard) -> None:
    given = torch.zeros(64, dtype=torch.int32)
    made = execute(card, "atom.global.gpu.acq_rel.add.u32 %r3, [%rd1], 2; st.global.b32 [%rd5], %r3;", given)
    assert given[0] == 128
    assert sorted(made.tolist()) == [*range(0, 128, 2)]


class PtxMutator:
    """A kernel launch whose PTX is executed with single instructions removed."""

    def __init__(self, card: EmulatedCard, launch: Callable[[], None]) -> None:
        self.card, self.launch = card, launch
        self.text = ""
        card.transform_ptx = self._record
        launch()

    def faults(self, line: str) -> list[str]:
        """The fault without each executed occurrence of `line`, a regular expression; "" where none was detected."""
        spans = [found.span() for found in re.finditer(line, self.text)]
        return [self._fault_with("", *span) for span in spans if self._fault_with("trap;", *span)]

    def _record(self, ptx: str) -> str:
        self.text = self.text or ptx
        return ptx

    def _fault_with(self, replacement: str, begin: int, end: int) -> str:
        changed = self.text[:begin] + replacement + self.text[end:]
        self.card.transform_ptx = lambda ptx: changed if ptx == self.text else ptx
        try:
            self.launch()
        except (Fault, AssertionError) as fault:
            return str(fault) or "wrong"
        return ""


@pytest.mark.parametrize(
    ("line", "message"),
    [(r"cp\.async\.wait_group[^;]*;", "copy is still under way"), (r"griddepcontrol\.wait[^;]*;", r"griddepcontrol\.wait")],
)
def test_removing_any_wait_of_a_product_is_detected(card: EmulatedCard, line: str, message: str) -> None:
    x, weight = (normal(count, 1040, dtype=torch.bfloat16, device=torch.device("cpu"), seed=count) for count in (3, 16))

    def product() -> None:
        assert_near(linear(x, weight), x.float() @ weight.float().T, "matmul", scale=32)

    faults = PtxMutator(card, product).faults(line)
    assert faults
    assert all(re.search(message, fault) for fault in faults), faults


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (r"wgmma\.wait_group[^;]*;", "wgmma is still"),
        (r"fence\.proxy\.async[^;]*;", r"fence\.proxy\.async"),
        (r"bar\.sync\s+0;", "another warp"),
    ],
)
def test_removing_waits_fences_or_barriers_of_a_prefill_is_detected(card: EmulatedCard, line: str, message: str) -> None:
    batch = AttentionBatch(AttentionShape(16, 4, 1, 64), [80], [33])
    faults = PtxMutator(card, batch.check_prefill).faults(line)
    assert any(re.search(message, fault) for fault in faults), faults
