"""As nvidia-ml-py, with two GPUs that do what the file FAKE_NVML says: {"events": [[gpu, xid]],
"rows": {gpu: [pending, failed]}, "lost": [gpu]}."""

import json
import os
import time
from types import SimpleNamespace

NVML_ERROR_TIMEOUT, NVML_ERROR_GPU_IS_LOST, NVML_ERROR_NOT_SUPPORTED = 10, 15, 3
nvmlEventTypeXidCriticalError = 8


class NVMLError(Exception):
    def __init__(self, value):
        super().__init__(f"error {value}")
        self.value = value


def _told():
    with open(os.environ["FAKE_NVML"]) as file:
        return json.load(file)


_taken = 0


def nvmlInit():
    if _told().get("driver") == "broken":
        raise NVMLError(9)


def nvmlDeviceGetCount():
    return 2


def nvmlDeviceGetHandleByIndex(number):
    return number


def nvmlDeviceGetUUID(number):
    return f"GPU-{number}"


def nvmlEventSetCreate():
    return []


def nvmlDeviceRegisterEvents(gpu, types, events):
    assert types == nvmlEventTypeXidCriticalError
    if gpu in _told().get("silent", ()):
        raise NVMLError(NVML_ERROR_NOT_SUPPORTED)
    events.append(gpu)


def nvmlEventSetWait_v2(events, milliseconds):
    global _taken
    waiting = [tuple(event) for event in _told().get("events", ())][_taken:]
    if not waiting:
        time.sleep(min(0.05, milliseconds / 1000))
        raise NVMLError(NVML_ERROR_TIMEOUT)
    _taken += 1
    gpu, xid = waiting[0]
    return SimpleNamespace(device=gpu, eventType=8, eventData=xid)


def nvmlDeviceGetRemappedRows(gpu):
    if gpu in _told().get("lost", ()):
        raise NVMLError(NVML_ERROR_GPU_IS_LOST)
    rows = _told().get("rows", {}).get(str(gpu))
    if rows is None:
        raise NVMLError(NVML_ERROR_NOT_SUPPORTED)
    return (0, 0, *rows)
