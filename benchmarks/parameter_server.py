"""A scheduler or server of MXNet's parameter server; which one, ``DMLC_ROLE`` says.

``import mxnet`` runs the role and returns only when the job ends.
"""

from __future__ import annotations

import numpy

from benchmarks.processes import die_with_parent

if __name__ == "__main__":
    die_with_parent()
    numpy.bool = bool  # MXNet 1.9.1 reads this alias, which NumPy 1.24 removed.
    import mxnet  # noqa: F401
