"""The Metal function around a kernel's body, with the parameters that MLX gives it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

Template = Sequence[tuple[str, "bool | int | mx.Dtype"]]

# name -> (Metal's type, the expression for it in the runtime's Thread), in MLX's order.
ATTRIBUTES = {
    "dispatch_quadgroups_per_threadgroup": ("uint", "t->dispatched_simdgroups * 8"),
    "dispatch_simdgroups_per_threadgroup": ("uint", "t->dispatched_simdgroups"),
    "dispatch_threads_per_threadgroup": ("uint3", "EMU_UINT3(t->dispatched)"),
    "grid_origin": ("uint3", "uint3{0, 0, 0}"),
    "grid_size": ("uint3", "EMU_UINT3(t->grid)"),
    "quadgroup_index_in_threadgroup": ("uint", "t->index / 4"),
    "quadgroups_per_threadgroup": ("uint", "(t->threads[0] * t->threads[1] * t->threads[2] + 3) / 4"),
    "simdgroup_index_in_threadgroup": ("uint", "t->simdgroup"),
    "simdgroups_per_threadgroup": ("uint", "t->simdgroups"),
    "thread_execution_width": ("uint", "32u"),
    "thread_index_in_quadgroup": ("uint", "t->index % 4"),
    "thread_index_in_simdgroup": ("uint", "t->lane"),
    "thread_index_in_threadgroup": ("uint", "t->index"),
    "thread_position_in_grid": ("uint3", "EMU_UINT3(t->position_in_grid)"),
    "thread_position_in_threadgroup": ("uint3", "EMU_UINT3(t->position_in_threadgroup)"),
    "threadgroup_position_in_grid": ("uint3", "EMU_UINT3(t->threadgroup_position)"),
    "threadgroups_per_grid": ("uint3", "EMU_UINT3(t->threadgroups)"),
    "threads_per_grid": ("uint3", "EMU_UINT3(t->grid)"),
    "threads_per_simdgroup": ("uint", "32u"),
    "threads_per_threadgroup": ("uint3", "EMU_UINT3(t->threads)"),
}
EXTRAS = (("_shape", "int", "*"), ("_strides", "int64_t", "*"), ("_ndim", "int", "&"))
CONSTANT_BELOW = 8  # elements: smaller inputs are passed in constant memory

TYPES = {
    mx.float32: "float",
    mx.float16: "float16_t",
    mx.bfloat16: "bfloat16_t",
    mx.bool_: "bool",
    **{getattr(mx, f"{sign}int{bits}"): f"{sign}int{bits}_t" for sign in ("", "u") for bits in (8, 16, 32, 64)},
}


@dataclass(frozen=True)
class Parameter:
    """A parameter of the Metal function."""

    declaration: str
    """As MLX writes it, without the [[...]]."""
    attribute: str
    """The text inside [[...]]."""
    source: str
    """Argument in the entry function's call."""

    def __str__(self) -> str:
        return f"{self.declaration} [[{self.attribute}]]"


@dataclass(frozen=True)
class Body:
    """Source and names of a kernel, independent of any call."""

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    source: str
    """Body of the kernel function."""
    header: str
    """Source before the kernel function."""
    atomic_outputs: bool
    """True if outputs are declared as `atomic<T>`."""

    def extras(self, name: str) -> list[tuple[str, str, str]]:
        """Shape, strides and rank of an input, if the source has their names anywhere, even inside another name."""
        return [extra for extra in EXTRAS if name + extra[0] in self.source]

    def parameters(self, inputs: Sequence[mx.array], output_dtypes: Sequence[mx.Dtype]) -> list[Parameter]:
        """Parameters in MLX's order: inputs with their shapes, strides and ranks, outputs, then thread attributes that the source
        mentions."""
        found: list[Parameter] = []

        def add(place: str, kind: str, mark: str, name: str) -> None:
            i = len(found)
            source = f"{'*' if mark == '&' else ''}({place} {kind}*)a[{i}]"
            found.append(Parameter(f"{place} {kind}{mark} {name}", f"buffer({i})", source))

        for name, array in zip(self.inputs, inputs, strict=True):
            space = "constant" if array.size < CONSTANT_BELOW else "device"
            add(f"const {space}", TYPES[array.dtype], "*" if array.ndim else "&", name)
            for suffix, kind, mark in self.extras(name) if array.ndim else ():
                add("const constant", kind, mark, name + suffix)
        for name, dtype in zip(self.outputs, output_dtypes, strict=True):
            add("device", f"atomic<{TYPES[dtype]}>" if self.atomic_outputs else TYPES[dtype], "*", name)
        for attribute, (kind, source) in ATTRIBUTES.items():
            if attribute in self.source:
                found.append(Parameter(f"{kind} {attribute}", attribute, source))
        return found

    def code(self, inputs: Sequence[mx.array], output_dtypes: Sequence[mx.Dtype], template: Template) -> str:
        """The complete source. Kernels cannot be templates in C++ for OpenCL, so template arguments become names in the body."""
        parameters = self.parameters(inputs, output_dtypes)
        listed = ",\n  ".join(str(p) for p in parameters)
        passed = ",\n  ".join(p.source for p in parameters)
        return (
            f'#line 1 "{self.name}.header.metal"\n{_without_includes(self.header)}\n'
            f"__kernel void {self.name}(\n  {listed}) {{\n"
            + "".join(_template_argument(name, value) for name, value in template)
            + f'#line 1 "{self.name}.metal"\n{_without_includes(self.source)}\n}}\n'
            '#line 1 "entry"\n#define EMU_UINT3(x) uint3{x[0], x[1], x[2]}\n'
            'extern "C" __attribute__((visibility("default"))) void __emu_entry() {\n'
            "  const thread __emu_thread* t = __emu_self();\n  const thread size_t* a = t->arguments;\n"
            f"  {self.name}({passed});\n}}\n"
        )


def users_files(code: str) -> frozenset[str]:
    """File names in #line directives: the emulator's for source and header, and the user's own."""
    return frozenset(re.findall(r'^[ \t]*#[ \t]*line[ \t]+\d+[ \t]+"([^"]+)"', code, re.MULTILINE)) - {"entry"}


def _template_argument(name: str, value: bool | int | mx.Dtype) -> str:
    if isinstance(value, mx.Dtype):
        return f"using {name} = {TYPES[value]};\n"
    kind = "bool" if isinstance(value, bool) else "int"
    return f"constexpr {kind} {name} = {str(value).lower()};\n"


def _without_includes(text: str) -> str:
    """Empty the lines that include Metal's headers, which are already included. Line numbers stay."""
    return re.sub(r"^[ \t]*#[ \t]*include[ \t]*<metal_\w+>.*$", "", text, flags=re.MULTILINE)
