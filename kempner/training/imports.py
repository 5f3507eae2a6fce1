"""All imports of a rank until its first save, which a fork server makes once for all ranks. Other
modules import much of this only where needed, so that a rank without a fork server starts fast."""

# ruff: noqa: F401
import torch._dynamo
import torch.distributed.fsdp
import torch.distributed.tensor

import kempner.checkpoint.tensors.dcp_metadata
import kempner.training.main
