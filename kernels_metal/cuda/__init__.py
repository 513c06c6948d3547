"""The CUDA twin of the Metal kernels: the same source, translated word by word, through `mx.fast.cuda_kernel`."""

from __future__ import annotations

from .kernel import CudaKernel
from .translate import translate

__all__ = ["CudaKernel", "translate"]
