"""Products of each head with its own matrix."""

import mlx.core as mx
import numpy as np
import pytest
from support.models.plain_weights import pack

from mlxinfer.nn import latent_attention
from mlxinfer.nn.latent_attention import _by_head
from mlxinfer.nn.moe import ExpertLinear
from mlxinfer.nn.weights import Dense, Format, Matrix


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("form", [None, Format(4, 32), Format(4, 32, "mxfp4")])
def test_heads_multiply_by_their_own_matrices(form: Format | None, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Queries are a part of wider heads."""
    random = np.random.default_rng(rows)
    weight = mx.array(random.normal(size=(3, 40, 64)).astype(np.float32))
    x = mx.array(random.normal(size=(rows, 3, 96)).astype(np.float32))[..., :64]
    matrix: Matrix = Dense(weight) if form is None else pack(weight, form)
    used = np.array(matrix.weight if isinstance(matrix, Dense) else matrix.dequantize(mx.float32))
    for gpu in (False, True):
        monkeypatch.setattr(latent_attention, "is_gpu", lambda gpu=gpu: gpu)
        got = _by_head(ExpertLinear(matrix), x)
        assert got.shape == (rows, 3, 40)
        np.testing.assert_allclose(np.array(got), np.einsum("thi,hoi->tho", np.array(x), used), rtol=1e-4, atol=1e-4)
