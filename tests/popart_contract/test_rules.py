"""Every rule of the loader refuses a model that breaks it, and it alone, and accepts the same model put right."""

import pytest
from popart_contract.cases import CASES
from popart_contract.standin.errors import Refusal
from popart_contract.standin.rules import MODEL_RULES, NODE_RULES

pytestmark = pytest.mark.usefixtures("machine")


@pytest.fixture(autouse=True)
def weights_file(machine):
    with open("weights.bin", "wb") as file:
        file.write(bytes(64))


def test_every_rule_has_a_case():
    assert {name.partition("__")[0] for name in CASES} == set(MODEL_RULES) | set(NODE_RULES)


@pytest.mark.parametrize("name", CASES)
def test_rule(name):
    broken, fixed = CASES[name]()
    with pytest.raises(Refusal) as caught:
        broken.session()
    assert caught.value.rules == [name.partition("__")[0]], caught.value
    fixed.session()
