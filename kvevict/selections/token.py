from .. import _ops
from . import SELECTIONS


@SELECTIONS.add("token")
def token(score, n, keep, first, last, columns):
    """The best slots per kv head; ties go to the earlier slot."""
    return _ops.select(score, n, keep, first, last, columns)
