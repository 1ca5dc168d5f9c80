"""Sessions that the tests of one file share."""

import pytest
from session_cases import MIXED, generate_rows

from poptransformer import Session


@pytest.fixture(scope="module")
def reference(tiny):
    with Session(tiny, backend="reference", batch_size=3) as session:
        yield session


@pytest.fixture(scope="module")
def xla(tiny):
    with Session(tiny, batch_size=3) as session:
        yield session


@pytest.fixture(scope="module")
def texts(pocket):
    """gpt2-pocket, two rows of at most 128 tokens: the one with a tokenizer."""
    with Session(pocket, batch_size=2, max_length=128) as session:
        yield session


@pytest.fixture(params=["reference", "xla"])
def session(request):
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="module")
def alone(tiny):
    """Each row of MIXED by itself, in a Session of one row."""
    with Session(tiny) as session:
        return [generate_rows(session, [row])[0] for row in MIXED]
