"""Every kind of bug is put into a kernel; whoever should find it must find it, at the marked line, and must be silent without the bug."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
import pytest

from mlxinfer.kernels_metal import emulator

pytestmark = pytest.mark.emulator

THREADS = 64


@dataclass(frozen=True)
class Bug:
    """`found`: mode -> kind. `// HERE` marks the line that is named. Without `!bug!` (or with what follows it in `right`) all is well."""

    name: str
    source: str
    found: dict[str, str]
    wrong: str
    right: str
    threadgroups: int = 2

    def lines(self) -> set[int | None]:
        """The marked ones; of a race either access may come second."""
        return {i for i, text in enumerate(self.source.split("\n"), 1) if "// HERE" in text} or {None}


def run(bug: Bug, text: str, mode: str, order: str = "forward") -> mx.array:
    kernel = emulator.metal_kernel(bug.name, ["x"], ["out"], bug.source.replace("!bug!", text))
    count = THREADS * bug.threadgroups
    return kernel(
        inputs=[mx.arange(count).astype(mx.float32)],
        template=[("N", THREADS)],
        grid=(count, 1, 1),
        threadgroup=(THREADS, 1, 1),
        output_shapes=[(count,)],
        output_dtypes=[mx.float32],
        mode=mode,
        order=order,
        seed=7,
    )[0]


INDEX = """uint i = thread_position_in_grid.x, t = thread_index_in_threadgroup;
uint lane = thread_index_in_simdgroup, group = simdgroup_index_in_threadgroup;
"""
REVERSE = (
    INDEX
    + """threadgroup float tile[N];
tile[t] = x[i]; // HERE
!bug!
out[i] = tile[N - 1 - t]; // HERE
"""
)
NEIGHBOUR = (
    INDEX
    + """threadgroup float tile[N];
tile[t] = x[i]; // HERE
!bug!
out[i] = tile[t ^ 1]; // HERE
"""
)
BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"
SIMD_BARRIER = "simdgroup_barrier(mem_flags::mem_threadgroup);"
RACE = {"tsan": "race", "trace": "race"}
BOUNDS = {"asan": "bounds"}
DIVERGENCE = dict.fromkeys(("fast", "asan"), "divergence")
GARBAGE = {"msan": "uninitialised"}

BUGS = [
    Bug("read_beyond_buffer", INDEX + "out[i] = x[i + !bug!]; // HERE", BOUNDS, "1", "0"),
    Bug("write_beyond_buffer", INDEX + "out[i + !bug!] = x[i]; // HERE", BOUNDS, "1", "0"),
    Bug("read_before_buffer", INDEX + "out[i] = x[int(i) - !bug!]; // HERE", BOUNDS, "1", "0"),
    Bug(
        "beyond_threadgroup_array",
        INDEX + "threadgroup float tile[N];\ntile[t + !bug!] = x[i]; // HERE\nout[i] = tile[t + !bug!];",
        BOUNDS,
        "4",
        "0",
    ),
    Bug(
        "beyond_threadgroup_pointer",
        INDEX + "threadgroup float tile[N];\nthreadgroup float* p = tile;\np[t + !bug!] = x[i]; // HERE\nout[i] = p[t + !bug!];",
        BOUNDS,
        "4",
        "0",
    ),
    Bug(
        "beyond_thread_array",
        INDEX
        + "float own[4] = {1, 2, 3, 4};\nfloat sum = 0;\nfor (int k = 0; k !bug! 4; k++)\n  sum += own[k] * x[i]; // HERE\nout[i] = sum;",
        BOUNDS,
        "<=",
        "<",
    ),
    Bug("missing_barrier", REVERSE, {**RACE, **GARBAGE}, "", BARRIER),
    Bug("barrier_for_nothing", REVERSE, RACE, "threadgroup_barrier(mem_flags::mem_none);", BARRIER),
    Bug("barrier_for_other_memory", REVERSE, {"trace": "race"}, "threadgroup_barrier(mem_flags::mem_device);", BARRIER),
    Bug("simdgroup_barrier_is_too_little", REVERSE, {**RACE, **GARBAGE}, SIMD_BARRIER, BARRIER),
    Bug("missing_simdgroup_barrier", NEIGHBOUR, {**RACE, **GARBAGE}, "", SIMD_BARRIER),
    Bug("simd_operation_is_no_barrier", NEIGHBOUR, RACE, "float sum = simd_sum(x[i]);", SIMD_BARRIER),
    Bug(
        "second_round_without_barrier",
        INDEX
        + "threadgroup float tile[N];\nfloat sum = 0;\nfor (int k = 0; k < 2; k++) {\n  tile[t] = x[i] + k; // HERE\n"
        + f"  {BARRIER}\n  sum += tile[N - 1 - t]; // HERE\n  !bug!\n}}\nout[i] = sum;",
        RACE,
        "",
        BARRIER,
    ),
    Bug(
        "divergent_simd_operation",
        INDEX + "float sum = x[i];\nif (lane < !bug!)\n  sum = simd_sum(sum); // HERE\nout[i] = sum;",
        DIVERGENCE,
        "16",
        "32",
    ),
    Bug(
        "divergent_barrier",
        INDEX + f"if (group != !bug!)\n  {BARRIER} // HERE\nout[i] = x[i];",
        DIVERGENCE,
        "0",
        "9",
    ),
    Bug(
        "early_return",
        INDEX + "if (lane == !bug!) return;\nout[i] = simd_max(x[i]); // HERE",
        dict.fromkeys(emulator.MODES, "divergence"),
        "31",
        "32",
    ),
    Bug(
        "different_barriers",
        INDEX + f"if (group == !bug!)\n  {BARRIER} // HERE\nelse\n  {BARRIER}\nout[i] = x[i];",
        DIVERGENCE,
        "0",
        "9",
    ),
    Bug(
        "uninitialised_threadgroup_memory",
        INDEX + f"threadgroup float tile[N];\nif (t != !bug!) tile[t] = x[i];\n{BARRIER}\nout[i] = tile[t] > 5 ? 1 : 0; // HERE",
        GARBAGE,
        "9",
        "N",
    ),
    Bug(
        "threadgroup_memory_of_the_threadgroup_before",
        INDEX + f"threadgroup float tile[N];\nif (i < !bug!) tile[t] = x[i];\n{BARRIER}\nout[i] = tile[t] > 5 ? 1 : 0; // HERE",
        GARBAGE,
        "N",
        "2 * N",
    ),
    Bug("uninitialised_thread_memory", INDEX + "float sum !bug!;\nsum += x[i];\nout[i] = sum; // HERE", GARBAGE, "", "= 0"),
    Bug(
        "uninitialised_through_functions",
        INDEX + "float own[2];\nown[0] = x[i];\nfloat all = simd_sum(own[!bug!]); // HERE\nout[i] = exp(max(all, 1.0f)) > 2 ? 1 : 0;",
        GARBAGE,
        "1",
        "0",
    ),
    Bug("unwritten_output", INDEX + "if (i != !bug!) out[i] = x[i];", {"msan": "unwritten"}, "5", "500"),
    Bug(
        "misaligned_vector",
        INDEX + "float2 v = *(const device float2*)(x + !bug!); // HERE\nout[i] = v.x + x[i];",
        {"asan": "undefined"},
        "1",
        "2",
    ),
    Bug("integer_overflow", INDEX + "int big = 0x7fffffff - 20;\nout[i] = big + int(t) !bug!; // HERE", {"asan": "undefined"}, "", "/ 8"),
    Bug("conversion_out_of_range", INDEX + "out[i] = uchar(x[i] !bug! 2); // HERE", {"asan": "undefined"}, "* 3 +", "* 0 +"),
    Bug("shift_by_the_width", INDEX + "uint word = uint(x[i]) >> (lane !bug!); // HERE\nout[i] = word;", {"asan": "undefined"}, "+ 1", ""),
    Bug("long_shift", INDEX + "ulong word = 1ul << (t !bug!); // HERE\nout[i] = word != 0;", {"asan": "undefined"}, "+ 1", ""),
    Bug("thread_array_by_pointer", INDEX + "float own[2] = {1, 2};\nthread float* p = own;\nout[i] = p[!bug!]; // HERE", BOUNDS, "2", "1"),
    Bug("two_writers", INDEX + "out[i] = x[i]; // HERE\nif (t == 0) out[!bug!] = x[i]; // HERE", {"trace": "two threadgroups"}, "0", "i"),
    Bug(
        "reads_what_others_write",
        INDEX + "out[i] = x[i]; // HERE\nout[i] += out[t + !bug!]; // HERE",
        {"trace": "two threadgroups"},
        "0",
        "i - t",
    ),
]


@pytest.mark.parametrize(("bug", "mode"), [(bug, mode) for bug in BUGS for mode in bug.found], ids=lambda x: getattr(x, "name", x))
def test_a_bug_is_found(bug: Bug, mode: str) -> None:
    with pytest.raises(emulator.KernelError) as caught:
        run(bug, bug.wrong, mode)
    assert caught.value.kind == bug.found[mode]
    assert caught.value.line in bug.lines()
    assert caught.value.file in (f"{bug.name}.metal", None)


@pytest.mark.parametrize(
    ("bug", "mode"),
    [
        pytest.param(bug, mode, marks=pytest.mark.slow if place else (), id=f"{bug.name}-{mode}")
        for bug in BUGS
        for place, mode in enumerate(bug.found)
    ],
)
def test_nothing_is_found_without_the_bug(bug: Bug, mode: str) -> None:
    run(bug, bug.right, mode, "random")


@pytest.mark.parametrize("name", ["two_writers", "missing_barrier"])
def test_orders_change_what_a_race_computes(name: str) -> None:
    bug = next(bug for bug in BUGS if bug.name == name)
    wrong = [run(bug, bug.wrong, "fast", order).tolist() for order in emulator.ORDERS]
    right = [run(bug, bug.right, "fast", order).tolist() for order in emulator.ORDERS]
    assert str(wrong[0]) != str(wrong[1])
    assert right[0] == right[1] == right[2]


@pytest.mark.parametrize("mode", ["fast", "asan", "tsan", "trace"])
def test_what_is_not_written_is_nan(mode: str) -> None:
    bug = next(bug for bug in BUGS if bug.name == "unwritten_output")
    out = run(bug, bug.wrong, mode)
    assert mx.isnan(out).tolist() == [i == 5 for i in range(out.size)]


def test_a_process_lives_on_after_a_bug() -> None:
    bug = BUGS[0]
    for _ in range(2):
        with pytest.raises(emulator.KernelError):
            run(bug, bug.wrong, "asan")
        assert run(bug, bug.right, "asan").tolist() == list(range(THREADS * bug.threadgroups))
