"""Steps that MLX replays, together with what else requests and engines can have."""

from __future__ import annotations

import pytest
from engine.test_compiled_step import PROMPTS, answered, engine, on_a_gpu, steps
