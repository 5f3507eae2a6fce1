"""Variables of NCCL, CUDA and its allocator: added to what is exported, which stays."""

from __future__ import annotations

from typing import Any

import pytest

from kempner.config.site import DistributedSection

EVERYTHING = {
    "nccl": {
        "ib_disable": False, "net_gdr_level": 2, "ib_gid_index": 3, "nvls_enable": False,
        "buffsize": 8388608, "debug": "INFO",
    },
    "avoid_record_streams": True,
    "cuda_device_max_connections": 1,
    "expandable_segments": True,
}  # fmt: skip
AS_VARIABLES = {
    "NCCL_IB_DISABLE": "0",
    "NCCL_NET_GDR_LEVEL": "2",
    "NCCL_IB_GID_INDEX": "3",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_BUFFSIZE": "8388608",
    "NCCL_DEBUG": "INFO",
    "TORCH_NCCL_AVOID_RECORD_STREAMS": "1",
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
}


def of(**values: Any) -> DistributedSection:
    return DistributedSection.model_validate(values)


def test_what_is_configured_is_added_and_nothing_else() -> None:
    assert of().environment({}) == {}
    assert of(**EVERYTHING).environment({"HOME": "/root"}) == AS_VARIABLES


def test_what_is_exported_stays() -> None:
    exported = dict.fromkeys(AS_VARIABLES, "mine") | {
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False"
    }
    assert of(**EVERYTHING).environment(exported) == {}


@pytest.mark.parametrize(
    ("exported", "added"),
    [
        ("max_split_size_mb:128", "max_split_size_mb:128,expandable_segments:False"),
        ("", "expandable_segments:False"),
    ],
)
def test_the_allocator_keeps_its_other_settings(exported: str, added: str) -> None:
    found = of(expandable_segments=False).environment({"PYTORCH_CUDA_ALLOC_CONF": exported})
    assert found == {"PYTORCH_CUDA_ALLOC_CONF": added}
