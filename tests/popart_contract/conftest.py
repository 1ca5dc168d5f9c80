"""The stand-in as `popart`, in a working directory of the test's own."""

import pytest
from popart_contract.standin.module import installed


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A fresh host with the stand-in installed; gives its Machine."""
    monkeypatch.chdir(tmp_path)
    with installed() as made:
        yield made
