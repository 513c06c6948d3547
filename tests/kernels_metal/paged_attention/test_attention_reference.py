"""The plain-MLX attention against float64 numpy, at odd sizes."""

import mlx.core as mx
import numpy as np
import pytest

from mlxinfer.kernels_metal.paged_attention.reference import attention


def naive(q, k, v, scale, window, softcap, sinks):
    heads, rows, _ = q.shape
    groups, keys = heads // k.shape[0], k.shape[1]
    out = np.zeros((heads, rows, v.shape[-1]))
    for h in range(heads):
        for r in range(rows):
            position = keys - rows + r
            first = 0 if window is None else max(0, position - window + 1)
            scores = scale * (k[h // groups, first : position + 1] @ q[h, r])
            if softcap is not None:
                scores = softcap * np.tanh(scores / softcap)
            logits = scores if sinks is None else np.append(scores, sinks[h])
            weights = np.exp(logits - logits.max())
            weights /= weights.sum()
            out[h, r] = weights[: len(scores)] @ v[h // groups, first : position + 1]
    return out


@pytest.mark.parametrize("rows", [1, 2, 7, 33])
@pytest.mark.parametrize("window", [None, 1, 5, 40, 1000])
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_agrees_with_float64(rows, window, softcap, with_sinks):
    rng = np.random.default_rng(rows)
    heads, kv_heads, keys, dim, value_dim = 6, 2, 45, 24, 24
    q = rng.standard_normal((heads, rows, dim))
    k = rng.standard_normal((kv_heads, keys, dim))
    v = rng.standard_normal((kv_heads, keys, value_dim))
    sinks = rng.standard_normal(heads) if with_sinks else None
    expected = naive(q, k, v, 0.3, window, softcap, sinks)
    arrays = [mx.array(a.astype(np.float32)) for a in (q, k, v)]
    sink_array = None if sinks is None else mx.array(sinks.astype(np.float32))
    got = attention(*arrays, scale=0.3, window=window, softcap=softcap, sinks=sink_array)
    np.testing.assert_allclose(np.array(got), expected, atol=2e-6)


def test_values_may_be_narrower_than_keys():
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((4, 3, 16)), rng.standard_normal((1, 9, 16)), rng.standard_normal((1, 9, 5))
    got = attention(*(mx.array(a.astype(np.float32)) for a in (q, k, v)), scale=0.25)
    np.testing.assert_allclose(np.array(got), naive(q, k, v, 0.25, None, None, None), atol=2e-6)
