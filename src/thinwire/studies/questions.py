"""All studies, in the order of their numbers; those that no reviewer asked for come last."""

from thinwire.studies import (
    frontier,
    owners,
    q1_energy,
    q2_time,
    q3_residual,
    q4_why_k,
    q5_choice_of_k,
    q6_weight_decay,
    q7_bytes,
    q11_compressors,
    q12_time_to_loss,
    q13_breakdown,
    q14_overlap,
    q16_decentralised,
    q17_values,
    q18_reproduce,
    q19_figures,
    recipe,
)
from thinwire.studies.study import Study

_MODULES = (
    q1_energy,
    q2_time,
    q3_residual,
    q4_why_k,
    q5_choice_of_k,
    q6_weight_decay,
    q7_bytes,
    q11_compressors,
    q12_time_to_loss,
    q13_breakdown,
    q14_overlap,
    q16_decentralised,
    q17_values,
    q18_reproduce,
    q19_figures,
    owners,
    recipe,
    frontier,
)
STUDIES: dict[str, Study] = {module.STUDY.name: module.STUDY for module in _MODULES}
