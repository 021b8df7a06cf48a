"""A refactoring keeps users' checkpoints: the same names, shapes and logits as when they were recorded."""

import pytest
import torch
from golden import FOLDER, NAMES, record, recorded
from torch.testing import assert_close

RECORDED = sorted(file.stem for file in FOLDER.glob("*.json"))  # also what another size has replaced since


def test_every_family_has_a_record() -> None:
    assert set(NAMES) <= set(RECORDED), "run tests/golden.py"


@pytest.mark.parametrize("name", RECORDED)
def test_weights_and_logits_are_those_of_the_record(name: str) -> None:
    found, expected = record(name), recorded(name)
    assert found["tensors"] == expected["tensors"]
    logits, then = torch.tensor(found["logits"]), torch.tensor(expected["logits"])
    assert_close(logits, then, rtol=1e-3, atol=1e-3 * float(then.abs().max()))
