"""A loop of DeepSpeed's (ZeRO 2): kempner supervise --nproc 2 -- python with_deepspeed.py"""

import os

import deepspeed
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss

from kempner import ShutdownHandler

STEPS = 40
CONFIG = {
    "train_micro_batch_size_per_gpu": 16,
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-3, "torch_adam": True}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}},
    "zero_optimization": {"stage": int(os.environ.get("ZERO", "2"))},
    "gradient_clipping": 1.0,
}

if not torch.cuda.is_available():
    os.environ["DS_ACCELERATOR"] = "cpu"
deepspeed.init_distributed("nccl" if torch.cuda.is_available() else "gloo")
rank = dist.get_rank()
torch.manual_seed(1)
curve = nn.Sequential(nn.Linear(1, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 1))
engine, *_ = deepspeed.initialize(model=curve, model_parameters=curve.parameters(), config=CONFIG)
engine.load_checkpoint("zero")  # the newest, by the name in its file `latest`
with ShutdownHandler() as shutdown:
    for step in range(engine.global_steps + 1, STEPS + 1):
        draws = torch.Generator().manual_seed(1000 * step + rank)  # the batch follows from the step
        x = (6 * torch.rand(16, 1, generator=draws) - 3).to(engine.device)
        loss = mse_loss(engine(x), torch.sin(2 * x))
        engine.backward(loss)
        engine.step()
        print(f"step {step} loss {loss.item().hex()}", flush=True)
        asked = shutdown.should_shutdown()
        if asked or step % 10 == 0:
            engine.save_checkpoint("zero")
        if asked:
            break
