"""All studies, in the order of their names."""

from thinwire.studies import owners, q3_residual
from thinwire.studies.study import Study

_MODULES = (
    q3_residual,
    owners,
)
STUDIES: dict[str, Study] = {module.STUDY.name: module.STUDY for module in _MODULES}
