"""The health of a node's GPUs, as `nvidia-smi` tells it in XML.

`nvidia-smi -q -x` is NVML's own report, comes with every driver, and is read here without a further
package. The names of its elements are those of NVIDIA's manual of nvidia-smi; where two are given,
the second is what older drivers call it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from xml.etree import ElementTree

_WITHIN = 30.0
"""Seconds for one call: a GPU that has fallen off the bus makes it hang."""

_THROTTLES = (
    "hw_slowdown",
    "hw_thermal_slowdown",
    "hw_power_brake_slowdown",
    "sw_thermal_slowdown",
)
"""Reasons for a slower clock that are a defect: heat or the power supply. That a GPU is idle, or at
its power limit, is none."""

_UNCORRECTED = (
    "sram_uncorrectable",
    "sram_uncorrectable_parity",
    "sram_uncorrectable_secded",
    "dram_uncorrectable",
    "double_bit/total",
)


@dataclass(frozen=True)
class Gpu:
    """One GPU. Memory is in bytes; `ecc` counts uncorrected errors since the last reboot; `remap`
    is "pending" or "failed" if rows of its memory are to be replaced; `processes` use it now."""

    index: int
    name: str
    memory_total: int = 0
    memory_used: int = 0
    ecc: int = 0
    remap: str = ""
    throttles: tuple[str, ...] = ()
    processes: tuple[int, ...] = ()


@dataclass(frozen=True)
class GpuSurvey:
    """The GPUs of a node, and why they could not be looked at; `driver` is its version, empty
    where there is none."""

    gpus: tuple[Gpu, ...] = ()
    driver: str = ""
    trouble: str = ""


def survey_gpus(environ: Mapping[str, str] = os.environ) -> GpuSurvey:
    """Ask nvidia-smi about the GPUs that this process may use; nothing where there is none."""
    try:
        done = subprocess.run(
            ["nvidia-smi", "-q", "-x"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_WITHIN,
        )
    except subprocess.TimeoutExpired:
        return GpuSurvey(trouble=f"nvidia-smi does not answer within {_WITHIN:g} s")
    except OSError as error:
        # Where a folder on PATH cannot be looked into, one that is nowhere has that folder's error.
        if shutil.which("nvidia-smi", mode=os.F_OK) is None:
            return GpuSurvey()
        return GpuSurvey(trouble=f"nvidia-smi cannot be started: {error.strerror}")
    if done.returncode:
        said = (done.stdout.strip() or done.stderr.strip()).replace("\n", " ")
        return GpuSurvey(trouble=f"nvidia-smi fails: {said or done.returncode}")
    try:
        found = read_survey(done.stdout)
    except ElementTree.ParseError as error:
        return GpuSurvey(trouble=f"nvidia-smi prints no XML: {error}")
    return _visible(found, environ.get("CUDA_VISIBLE_DEVICES"))


def read_survey(text: str) -> GpuSurvey:
    """What `nvidia-smi -q -x` printed. Raises `ElementTree.ParseError`."""
    root = ElementTree.fromstring(text)
    gpus = tuple(_gpu(number, element) for number, element in enumerate(root.iter("gpu")))
    return GpuSurvey(gpus, root.findtext("driver_version", ""))


def _visible(found: GpuSurvey, visible: str | None) -> GpuSurvey:
    """Without the GPUs that are hidden from CUDA by their numbers; UUIDs hide none."""
    words = [word.strip() for word in (visible or "").split(",")]
    if visible is None or not all(word.isdecimal() for word in words):
        return found
    # In a control group that shows a part of the GPUs they are numbered from 0, here and there.
    wanted = {int(word) for word in words}
    chosen = tuple(gpu for gpu in found.gpus if gpu.index in wanted)
    return GpuSurvey(chosen or found.gpus, found.driver, found.trouble)


def _gpu(number: int, element: ElementTree.Element) -> Gpu:
    return Gpu(
        index=number,
        name=element.findtext("product_name", "GPU"),
        memory_total=_bytes(element.findtext("fb_memory_usage/total", "")),
        memory_used=_bytes(element.findtext("fb_memory_usage/used", "")),
        ecc=sum(_count(element.findtext(f"ecc_errors/volatile/{name}")) for name in _UNCORRECTED),
        remap=_remap(element),
        throttles=tuple(_throttles(element)),
        processes=tuple(_count(pid.text) for pid in element.iterfind("processes/process_info/pid")),
    )


def _remap(element: ElementTree.Element) -> str:
    """Of rows (Ampere and later), or of pages (before)."""
    if element.findtext("remapped_rows/remapped_row_failure", "No") == "Yes":
        return "failed"
    pending = ("remapped_rows/remapped_row_pending", "retired_pages/pending_retirement",
               "retired_pages/pending_blacklist")  # fmt: skip
    return "pending" if any(element.findtext(path) == "Yes" for path in pending) else ""


def _throttles(element: ElementTree.Element) -> Iterator[str]:
    for group in ("clocks_event_reasons", "clocks_throttle_reasons"):
        for reason in element.iterfind(f"{group}/*"):
            name = reason.tag.removeprefix(group.removesuffix("s") + "_")
            if name in _THROTTLES and (reason.text or "").strip() == "Active":
                yield name.replace("_", " ")


def _bytes(text: str) -> int:
    """`81559 MiB`; 0 for `N/A`."""
    return _count(text.split()[0] if text.split() else "") << 20


def _count(text: str | None) -> int:
    return int(text) if text is not None and text.strip().isdecimal() else 0
