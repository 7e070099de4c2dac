"""What gradient steps on images take of the host's memory."""

import json
import platform
import subprocess
import sys

import pytest

STEPS = """
import json, resource, sys
import torch
from autoplace.ppo.batch import Batch
from autoplace.ppo.network import ActorCritic
from autoplace.ppo.update import Updater
from autoplace.workload import Hyperparameters, ImageSpec, NetworkSpec

torch.set_num_threads(1)
image = ImageSpec(key="", height=84, width=84, channels=4, channels_first=True)
spec = NetworkSpec(observation_size=image.size, hidden_sizes=(8,), action_size=2, images=(image,))
hyper = Hyperparameters(num_envs=8, rollout_steps=8, hidden_sizes=(8,))
updater = Updater(ActorCritic(spec), hyper, minibatch_rows=64)
rows = torch.randn(64, 4) * torch.tensor([0.0, 1.0, 1.0, 1.0])
pixels = torch.randint(256, (64, image.size), dtype=torch.uint8)
faults = []
for _ in range(9):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    updater.minibatch_step(Batch(rows, spec, pixels), torch.arange(64))
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
pages = 4 * pixels.numel() / resource.getpagesize()
usual = sorted(faults[4:])[2]
print(json.dumps({"compiler": "torch._dynamo" in sys.modules, "share": usual / pages}))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="memory is kept in glibc's heap")
def test_gradient_steps_on_images_reuse_their_memory_and_import_no_compiler():
    # Symptom: a quarter of an update goes into clearing pages that the step before gave back.
    done = subprocess.run([sys.executable, "-c", STEPS], check=True, capture_output=True, text=True)
    found = json.loads(done.stdout)
    assert found["compiler"] is False
    assert found["share"] < 0.1  # of the pages of a minibatch's pixels as floats
