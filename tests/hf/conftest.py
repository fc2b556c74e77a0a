"""A fixture for recorded tokens."""

from unittest import mock

import pytest

from kvevict.engine.record.calls import RECORDERS


@pytest.fixture
def replayed():
    """The tokens that were replayed, one entry each."""
    tokens, recorder = [], RECORDERS["cpu"]

    def record(run, device):
        output, again = recorder(run, device)
        return output, lambda: tokens.append(again())

    with mock.patch.dict(RECORDERS, cpu=record):
        yield tokens
