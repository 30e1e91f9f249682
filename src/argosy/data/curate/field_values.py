"""Keep records by the value of one of their fields, such as a language label that another tool wrote."""

from __future__ import annotations

from argosy.data.curate.curation_step import CurationStep, StepResult
from argosy.data.curate.text_batch import TextBatch
from argosy.data.text.records import field_of


class Step(CurationStep):
    """Remove records whose field is missing, not among `values`, or a number outside of `min` and `max`."""

    name: str
    values: tuple[str | int | float | bool, ...] = ()
    min: float | None = None
    max: float | None = None

    def fields(self) -> tuple[str, ...]:
        return (self.name,)

    def apply(self, batch: TextBatch) -> StepResult:
        result = StepResult()
        for number in batch.living():
            found = field_of(batch.fields[number], self.name)
            value = found[0] if found else None
            if value is None:
                result.removed[number] = "missing"
            elif self.values and value not in self.values:
                result.removed[number] = "value"
            elif self._is_outside(value):
                result.removed[number] = "range"
        return result

    def _is_outside(self, value: object) -> bool:
        if self.min is None and self.max is None:
            return False
        if isinstance(value, bool) or not isinstance(value, int | float):
            return True
        return (self.min is not None and value < self.min) or (self.max is not None and value > self.max)
