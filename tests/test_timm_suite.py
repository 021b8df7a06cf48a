"""timm's own tests of models on our names: one name per family, what the suite as it is does not reach on all."""

import pytest
import timm
import torch
from small_models import FAST, over_names
from timm_suite import CHECKS, ONLY_CALLED, excused, returns_tokens, run_check

from soft_models.registry import registered_names


def checks() -> list[object]:
    cases: list[object] = []
    for name in registered_names():
        for test in CHECKS:
            stand_in = test == "test_model_default_cfgs_non_std"
            if excused(test, name) or (stand_in and not returns_tokens(name)):
                continue
            if name in FAST:
                cases.append(pytest.param(test, name))
            elif test in ONLY_CALLED or stand_in:
                # The others run on every name with the suite as it is: `python tests/timm_suite.py`.
                cases.append(pytest.param(test, name, marks=pytest.mark.slow))
    return cases


# timm's suite does not turn warnings into errors, has marks of its own, and tests TorchScript, which torch deprecates.
@pytest.mark.filterwarnings("default", "ignore::pytest.PytestUnknownMarkWarning", "ignore:`torch.jit")
@pytest.mark.parametrize(("test", "name"), checks())
def test_of_timm(test: str, name: str) -> None:
    run_check(test, name)


@over_names
def test_exceptions_are_the_names_with_tokens(name: str) -> None:
    model = timm.create_model(name, device="meta").eval()
    features = model.forward_features(torch.empty(1, *model.pretrained_cfg["input_size"], device="meta"))
    assert (features.ndim == 3) == returns_tokens(name)
