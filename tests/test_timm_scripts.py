"""timm's own train.py and validate.py with models of ours; TIMM_SCRIPTS names the folder that holds them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tiny_data import write_folder

ROOT = Path(__file__).parents[1]
SCRIPTS = Path(os.environ.get("TIMM_SCRIPTS", "TIMM_SCRIPTS is not set"))


@pytest.mark.skipif(not (SCRIPTS / "train.py").is_file(), reason="TIMM_SCRIPTS names no folder with timm's train.py")
@pytest.mark.parametrize("name", ["soft_tiny", "cosformer_vit_tiny_patch16_224", "vvt_tiny"])
def test_timms_own_scripts_train_and_validate(name: str, tmp_path: Path) -> None:
    data = write_folder(tmp_path / "data")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    options = ["--data-dir", str(data), "--model", name, "--img-size", "32", "-b", "6", "-j", "1", "--num-classes", "3"]
    train = [sys.executable, str(SCRIPTS / "train.py"), *options, "--device", "cpu", "--device-modules", "soft_models"]
    train += ["--epochs", "1", "--warmup-epochs", "0", "--output", str(tmp_path), "--experiment", "run"]
    done = subprocess.run(train, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    checkpoint = tmp_path / "run" / "model_best.pth.tar"
    assert torch.load(checkpoint, weights_only=False)["arch"] == name
    # Its validate.py has no --device-modules.
    path = str(SCRIPTS / "validate.py")
    code = f"import runpy, soft_models; runpy.run_path({path!r}, run_name='__main__')"
    validate = [sys.executable, "-c", code, *options, "--device", "cpu", "--checkpoint", str(checkpoint)]
    done = subprocess.run(validate, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert '"top1"' in done.stdout
