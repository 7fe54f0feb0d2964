"""All studies, in the order of their names."""

from thinwire.studies import (
    owners,
    q3_residual,
    q4_why_k,
    q5_choice_of_k,
    q6_weight_decay,
    q7_bytes,
    q17_values,
    recipe,
)
from thinwire.studies.study import Study

_MODULES = (
    q3_residual,
    q4_why_k,
    q5_choice_of_k,
    q6_weight_decay,
    q7_bytes,
    q17_values,
    owners,
    recipe,
)
STUDIES: dict[str, Study] = {module.STUDY.name: module.STUDY for module in _MODULES}
