"""Makes every process believe that each of its ranks has a GPU, where all of them share the first one.

Python imports this at its start if the folder is on its path, as `run_gpu.sh` puts it there with `ONE_GPU`.
"""

import os

import torch

ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "2"))
if "LOCAL_RANK" in os.environ:
    os.environ["LOCAL_RANK"] = "0"
    torch.cuda.init()  # which counts the GPUs that there are
torch.cuda.device_count = lambda: ranks
torch.cuda.can_device_access_peer = lambda _device, _peer: True
