"""All studies, in the order of their names."""

from thinwire.studies import owners, q1_energy, q2_time, q3_residual, recipe
from thinwire.studies.study import Study

_MODULES = (
    q1_energy,
    q2_time,
    q3_residual,
    owners,
    recipe,
)
STUDIES: dict[str, Study] = {module.STUDY.name: module.STUDY for module in _MODULES}
