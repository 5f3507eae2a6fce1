"""Measurements of a node that only the doctor makes: of GPUs, software and storage.

`nvidia-smi -q -x` prints NVML's report, and comes with every driver. The names of its elements are
those of NVIDIA's manual of nvidia-smi; where two are given, the second is that of older drivers.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

_SMI_WITHIN = 30.0
"""Time limit of one call in seconds: it hangs if a GPU has fallen off the bus."""

_THROTTLES = (
    "hw_slowdown",
    "hw_thermal_slowdown",
    "hw_power_brake_slowdown",
    "sw_thermal_slowdown",
)
"""Reasons for a slower clock that are defects, of cooling or the power supply, unlike idleness or
the power limit."""

_UNCORRECTED = (
    *("sram_uncorrectable", "sram_uncorrectable_parity", "sram_uncorrectable_secded"),
    *("dram_uncorrectable", "double_bit/total"),
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
    """The GPUs of a node, the version of the driver (empty without one), and the error if they
    could not be examined."""

    gpus: tuple[Gpu, ...] = ()
    driver: str = ""
    trouble: str = ""


def survey_gpus(environ: Mapping[str, str] = os.environ) -> GpuSurvey:
    """The GPUs that this process may use, by nvidia-smi; an empty survey without it."""
    try:
        done = subprocess.run(
            ["nvidia-smi", "-q", "-x"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_SMI_WITHIN,
        )
    except subprocess.TimeoutExpired:
        return GpuSurvey(trouble=f"nvidia-smi does not answer within {_SMI_WITHIN:g} s")
    except OSError as error:
        # If a folder on PATH cannot be read, a missing command has that folder's error.
        if shutil.which("nvidia-smi", mode=os.F_OK) is None:
            return GpuSurvey()
        return GpuSurvey(trouble=f"nvidia-smi cannot be started: {error.strerror}")
    if done.returncode:
        output = (done.stdout.strip() or done.stderr.strip()).replace("\n", " ")
        return GpuSurvey(trouble=f"nvidia-smi fails: {output or done.returncode}")
    try:
        found = read_survey(done.stdout)
    except ElementTree.ParseError as error:
        return GpuSurvey(trouble=f"nvidia-smi prints no XML: {error}")
    return _visible(found, environ.get("CUDA_VISIBLE_DEVICES"))


def read_survey(text: str) -> GpuSurvey:
    root = ElementTree.fromstring(text)
    gpus = tuple(_gpu(number, element) for number, element in enumerate(root.iter("gpu")))
    return GpuSurvey(gpus, root.findtext("driver_version", ""))


def _visible(found: GpuSurvey, visible: str | None) -> GpuSurvey:
    """Without the GPUs that CUDA_VISIBLE_DEVICES hides by index; UUIDs hide none."""
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
    """Remapping of rows (Ampere and later), or of pages (before)."""
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


IMPORT_WITHIN = 180.0
"""Time limit in seconds of importing torch, which takes minutes from a busy network file system."""

_DRY_RUN = """
import importlib, json, sys
import kempner, torch
told = {
    "kempner": kempner.__version__,
    "torch": torch.__version__,
    "cuda": torch.version.cuda or torch.version.hip or "",
    "devices": torch.cuda.device_count() if torch.cuda.is_available() else 0,
}
for name in sys.argv[1:]:
    module, _, function = name.partition(":")
    found = importlib.import_module(module)
    for part in function.split(".") if function else ():
        found = getattr(found, part)
print(json.dumps(told))
"""


@dataclass(frozen=True)
class Software:
    """Versions; `cuda` is that of CUDA or ROCm which torch was built with, empty for CPUs alone;
    `devices` is the number of GPUs that it can use. `trouble` says why an import failed."""

    python: str = ""
    kempner: str = ""
    torch: str = ""
    cuda: str = ""
    devices: int = 0
    trouble: str = ""


def look_at_software(imports: Sequence[str] = ()) -> Software:
    """Import torch and `imports` (`module` or `module:function`) in a process of its own."""
    python = platform.python_version()
    try:
        done = subprocess.run(
            [sys.executable, "-c", _DRY_RUN, *imports],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=IMPORT_WITHIN,
        )
    except subprocess.TimeoutExpired:
        trouble = f"its import takes longer than {IMPORT_WITHIN:g} s"
        return Software(python, trouble=trouble)
    except OSError as error:
        return Software(python, trouble=str(error))
    if done.returncode:
        last = [line.strip() for line in done.stderr.splitlines() if line.strip()][-1:]
        trouble = last[0] if last else f"the process ended with {done.returncode}"
        return Software(python, trouble=trouble)
    fields = json.loads(done.stdout.splitlines()[-1])
    return Software(python, **fields)


LARGEST = 128 * 2**20
"""Bytes that one node writes at most."""

TOGETHER = 16 * 2**30
"""Bytes that all nodes write at most."""

SHARE = 0.05
"""Share of the free space that all nodes use at most."""

LONGEST = 2.0
"""Seconds after which no further piece is written."""

_PIECE, _LEAST = 4 * 2**20, 4096
_SYNC_EVERY = 4
"""Pieces between two fsyncs, so that the last one is short as well."""


@dataclass(frozen=True)
class WriteRate:
    """`written` bytes in `seconds`, with fsync; `trouble` says why writing failed."""

    written: int
    seconds: float
    trouble: str = ""

    @property
    def rate(self) -> float | None:
        """Bytes a second; None if nothing was written."""
        return self.written / self.seconds if self.written and self.seconds > 0 else None


def write_test(folder: Path, name: str, writers: int = 1) -> WriteRate:
    """Write to a file in `folder` that is unlinked before it has content, so that nothing is left
    behind, however this process ends. `writers` nodes do so at once."""
    written, began = 0, time.monotonic()
    try:
        together = min(TOGETHER, int(SHARE * shutil.disk_usage(folder).free))
        largest = max(_LEAST, min(LARGEST, together // writers))
        # Random, since a file system may compress.
        content = os.urandom(min(_PIECE, largest))
        path = folder / name
        with open(path, "xb", buffering=0) as file:
            path.unlink()
            began = time.monotonic()
            pieces = 0
            while written < largest and time.monotonic() - began < LONGEST:
                written += file.write(content)
                pieces += 1
                if pieces % _SYNC_EVERY == 0:
                    os.fsync(file.fileno())
            os.fsync(file.fileno())
    except OSError as error:
        return WriteRate(written, time.monotonic() - began, error.strerror or str(error))
    return WriteRate(written, time.monotonic() - began)
