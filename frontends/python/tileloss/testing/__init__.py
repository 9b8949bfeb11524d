"""Checks of losses, for anybody's tests: a loss and its gradient against an oracle in double precision.

`check` draws a case, calls a function on it and judges what it returns; `judge` judges outputs that are there. `Case` is what an
implementation gets that is to see everything, as of `tileloss audit --impl`, and `Refused` what it raises for what it does not
offer. Nothing is needed but numpy and ml_dtypes, and the framework of the function that is checked.

case.py     Case: tensors, options, what is asked for; helpers for PyTorch and JAX
outputs.py  what an implementation returned, as the judge reads it
_check.py   check, judge
_drawn.py   a case from settings, and the report on its outputs
_judge.py   libtileloss_judge.so, which draws and judges
"""

from tileloss.testing._check import check, judge
from tileloss.testing._drawn import Gate, Report
from tileloss.testing.case import Case, Refused

__all__ = ["Case", "Gate", "Refused", "Report", "check", "judge"]
