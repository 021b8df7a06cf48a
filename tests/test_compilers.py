"""The models compiled, exported and traced."""

import copy
import warnings
from pathlib import Path

import pytest
import torch
from small_models import (
    HALF_ERROR,
    SIZE,
    close,
    few_newton_steps,
    gradients,
    images,
    loss_of,
    over_families,
    relative_error,
    small,
    through_file,
)
from torch._dynamo.testing import CompileCounter


@over_families
@pytest.mark.parametrize(
    ("training", "checkpointing"),
    [
        (True, False),
        pytest.param(False, False, marks=pytest.mark.slow),
        pytest.param(True, True, marks=pytest.mark.slow),
    ],
)
def test_compiles_without_graph_breaks(name: str, training: bool, checkpointing: bool, fresh_dynamo: None) -> None:
    model = few_newton_steps(small(name)).train(training)
    compiled_from = copy.deepcopy(model)
    compiled_from.set_grad_checkpointing(checkpointing)
    compiled = torch.compile(compiled_from, fullgraph=True, backend="eager")
    expected, actual = model(images()), compiled(images())
    close(actual, expected, "logits", rtol=1e-5)
    loss_of(expected).backward()
    loss_of(actual).backward()
    wanted = gradients(model)
    for key, gradient in gradients(compiled_from).items():
        close(gradient, wanted[key], f"gradient of {key}")


@pytest.mark.slow  # tens of seconds; the attentions alone are tested fast
@over_families
@pytest.mark.parametrize("other", [(5, SIZE), (2, (64, 96))], ids=["batch", "size"])
def test_another_batch_or_size_compiles_once_more_at_most(
    name: str, other: tuple[int, tuple[int, int]], fresh_dynamo: None
) -> None:
    model = few_newton_steps(small(name))
    counter = CompileCounter()
    compiled = torch.compile(model, backend=counter)
    with torch.no_grad():
        compiled(images())
        assert counter.frame_count == 1, "graphs"
        x = images(*other)
        close(compiled(x), model(x), "logits", rtol=1e-5)
    assert counter.frame_count <= 2, "graphs"


@over_families
def test_exported_program_takes_other_batches_and_survives_a_file(name: str) -> None:
    model = few_newton_steps(small(name))
    batch = torch.export.Dim("batch", min=1, max=8)
    program = torch.export.export(model, (images(),), dynamic_shapes=({0: batch},))
    reloaded = through_file(program).module()
    with torch.no_grad():
        for count in (1, 8):
            close(reloaded(images(count)), model(images(count)), f"logits of a batch of {count}", rtol=1e-5)


@over_families
def test_traced_model_gives_equal_logits(name: str) -> None:
    model = few_newton_steps(small(name))
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # torch deprecates TorchScript, and tells of each shape that a trace fixes
        traced = torch.jit.trace(model, images(), check_trace=False)
        x = 0.5 * images().flip(0)
        close(traced(x), model(x), "logits", rtol=1e-5)


@over_families
@pytest.mark.parametrize("how", ["script", "trace"])
def test_torchscript_under_autocast_stays_near_float32(name: str, how: str) -> None:
    model = few_newton_steps(small(name)) if how == "trace" else small(name)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        graph = torch.jit.script(model) if how == "script" else torch.jit.trace(model, images(), check_trace=False)
        for _ in range(3):  # the first calls may run another graph than the later ones
            with torch.autocast("cpu", torch.bfloat16):
                found = graph(images())
            assert relative_error(found, model(images())) < HALF_ERROR


def test_older_onnx_exporter_writes_the_model(tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    model, file = small("soft_tiny"), tmp_path / "model.onnx"
    x = images(1, (224, 224))  # it pools only maps that the grid of landmarks divides
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(model, (x,), str(file), dynamo=False, opset_version=17)
    session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    with torch.no_grad():
        close(torch.from_numpy(found), model(x), "logits", rtol=1e-4)
