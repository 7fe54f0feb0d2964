"""All studies, in the order of their names."""

from thinwire.studies import q3_residual
from thinwire.studies.study import Study

STUDIES: dict[str, Study] = {module.STUDY.name: module.STUDY for module in (q3_residual,)}
