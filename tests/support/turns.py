"""Which of many alike cases `make test` runs; `make test-all` runs them all."""

import pytest


def some(cases, one_in, always=()):
    """Mark all but one in so many cases as ``exhaustive``, each a tuple of arguments or one.

    Those in ``always`` are run wherever they stand.
    """
    return [
        case
        if number % one_in == 0 or case in always
        else pytest.param(*_arguments(case), marks=pytest.mark.exhaustive)
        for number, case in enumerate(cases)
    ]


def _arguments(case):
    return case if type(case) is tuple else (case,)
