"""A size or a loss that was asked for, turned into a plan of formats."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ... import kernels_cpu
from ...loading.checkpoint import Checkpoint
from ...loading.load import open_checkpoint
from ...loading.weights import Progress
from ...nn.weights import Format
from ..report import Report
from ..write.journal import Journal
from .budget import Choice, Item, items_of, make_plan
from .preparation import Texts, texts_to_read
from .quantization_plan import NAME, QuantizationPlan, read_plan
from .sensitivity import sensitivities
from .weight_map import ConversionPlan

TOKENS = 4096
"""Read to find out what errors cost: few numbers are wanted, so few tokens do."""


@dataclass(slots=True)
class Budget:
    """What was asked for instead of bits."""

    bpw: float | None
    """Bits per weight of all that is written."""
    target_kl: float | None
    """The KL divergence to stay below, in nats."""
    plan: QuantizationPlan | None
    """A plan to replay; once it has been made, that of the conversion."""
    replayed: bool = field(default=False)
    """Whether the plan was given."""

    @classmethod
    def of(cls, bpw: float | None, target_kl: float | None, plan: str | Path | None) -> Budget | None:
        """Return the budget, None if nothing is given. Raises `ConversionError` for plans that cannot be read."""
        if bpw is None and target_kl is None and plan is None:
            return None
        return cls(bpw, target_kl, None if plan is None else read_plan(plan), plan is not None)

    def key(self) -> dict[str, Any]:
        """What the result depends on."""
        return {"bpw": self.bpw, "target_kl": self.target_kl, "plan": self.plan.to_json() if self.plan and self.replayed else None}

    def replay(self, planned: ConversionPlan) -> ConversionPlan:
        """The conversion in the formats of the plan that was given, if one was. Raises `ConversionError` where they do not fit."""
        return self.plan.apply(planned) if self.plan else planned

    def decide(
        self,
        checkpoint: Checkpoint,
        planned: ConversionPlan,
        texts: Texts,
        journal: Journal,
        progress: Progress | None,
        *,
        gptq: bool = False,
    ) -> ConversionPlan:
        """The conversion in formats that suit what was asked for; with `gptq`, more texts will be needed afterwards. Raises
        `ConversionError` where that cannot be had, `MLXInferError`."""
        if self.replayed:
            return planned
        read = texts_to_read(checkpoint, texts, journal, None if gptq else TOKENS)
        items = self._items(checkpoint, planned, read, journal, progress, gptq=gptq)
        self.plan = make_plan(planned, items, bpw=self.bpw, target_kl=self.target_kl)
        return self.plan.apply(planned)

    def write(self, folder: Path) -> None:
        """The plan as a file in this folder."""
        assert self.plan is not None
        (folder / NAME).write_text(self.plan.to_json(), encoding="utf-8")

    def notes(self, report: Report) -> list[str]:
        """What was expected, and what came out."""
        assert self.plan is not None
        notes = [f"formats (bits/group): {self.plan.summary()}, in {NAME}"]
        if not math.isnan(self.plan.kl):
            measured = f"; measured {report.quality.kl:.4f}" if report.quality else ""
            notes.append(f"expected KL {self.plan.kl:.4f}, on the model's own samples{measured}")
            if self.target_kl is not None and report.quality and report.quality.kl > self.target_kl:
                notes.append(f"the measured KL is above the target of {self.target_kl:g}: ask for less, or for --encoder gptq")
        return notes

    def _items(
        self,
        checkpoint: Checkpoint,
        planned: ConversionPlan,
        texts: Sequence[Sequence[int]],
        journal: Journal,
        progress: Progress | None,
        *,
        gptq: bool,
    ) -> list[Item]:
        outputs = {output.name: output for output in planned.outputs}
        kept = journal.done("costs")
        if kept is None:
            read: list[Sequence[int]] = []
            used = 0
            for text in texts:
                if used + len(text) <= TOKENS or not read:
                    read.append(text)
                    used += len(text)
            forward = open_checkpoint(checkpoint.path, raw_blocks=kernels_cpu.in_use())
            try:
                found = sensitivities(checkpoint, forward, read, progress)
            finally:
                forward.close()
            kept = {"items": [_entry(item) for item in items_of(checkpoint, planned, found, feedback=gptq)]}
            journal.record("costs", json.loads(json.dumps(kept)))
        return [Item(tuple(outputs[name] for name in names), tuple(map(_choice, choices))) for names, choices in kept["items"]]


def _choice(entry: list[Any]) -> Choice:
    bits, group_size, nbytes, cost = entry
    return Choice(Format(bits, group_size), nbytes, cost)


def _entry(item: Item) -> list[Any]:
    choices = [[each.form.bits, each.form.group_size, each.nbytes, each.cost] for each in item.choices]
    return [[output.name for output in item.outputs], choices]
