"""Stands for a disk that fills up."""

import contextlib
import resource


@contextlib.contextmanager
def files_of_at_most(num_bytes):
    """Writing on fails in the middle of what is written, as on a disk that fills up.

    Nothing else may write files meanwhile: it binds the whole process.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
