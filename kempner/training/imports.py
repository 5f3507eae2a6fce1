"""All that a rank imports until its first save: a fork server does it once for all ranks.

Elsewhere much of this is imported where it is needed, so that a rank that starts by itself does not
wait for what it may not need.
"""

# ruff: noqa: F401
import torch._dynamo
import torch.distributed.fsdp
import torch.distributed.tensor

import kempner.checkpoint.tensors.dcp_metadata
import kempner.training.main
