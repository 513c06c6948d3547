"""A step's memory for matrices of GGUF blocks, which a GPU unpacks in slices."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from mlxinfer.loading.memory import step as step_memory
from mlxinfer.nn.linear import Linear
from mlxinfer.nn.small_batch_matmul import UNPACKED_BYTES
from mlxinfer.nn.weights import Blocks, Dense, Format, RawBlocks

Q6_K, Q3_K = Format(6, 16, "Q6_K"), Format(3, 16, "Q3_K")


def in_file(rows: int, form: Format) -> Linear:
    return Linear(RawBlocks((), (), np.zeros(rows, np.int32), 4096, form))


@pytest.mark.parametrize(("gpu", "bytes_of_large"), [(True, 2 * UNPACKED_BYTES), (False, 128256 * 4096 * 2)])
def test_a_gpu_unpacks_slices_and_a_cpu_without_kernels_the_whole(gpu: bool, bytes_of_large: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_memory, "is_gpu", lambda: gpu)
    monkeypatch.setattr(step_memory.kernels_cpu, "in_use", lambda: False)
    assert step_memory.unpacked_bytes(in_file(128256, Q6_K), mx.float16) == bytes_of_large
    assert step_memory.unpacked_bytes(in_file(1024, Q6_K), mx.float16) == 1024 * 4096 * 2
    assert step_memory.unpacked_bytes(in_file(128256, Q3_K), mx.float16) == 128256 * 4096 * 2


def test_blocks_in_memory_count_and_other_matrices_do_not() -> None:
    rows = UNPACKED_BYTES // 4096
    blocks = Blocks(mx.broadcast_to(mx.zeros((), mx.uint8), (rows * 4, 16 * 210)), Q6_K)
    assert step_memory.unpacked_bytes(Linear(blocks), mx.float16) == 2 * UNPACKED_BYTES
    assert step_memory.unpacked_bytes(Linear(Dense(mx.zeros((8, 8)))), mx.float16) == 0
