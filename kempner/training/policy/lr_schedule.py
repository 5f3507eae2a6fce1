"""The learning rate as a pure function of the step."""

from __future__ import annotations

import math

from kempner.config.sections import SchedulerSection


def learning_rate(step: int, peak: float, max_steps: int, schedule: SchedulerSection) -> float:
    """The rate for step 1 ... `max_steps`.

    Linear warm-up over `warmup_steps` reaches `peak` at its last step. Then: `constant` stays;
    `linear` and `cosine` (half a period, as in SGDR, arXiv:1608.03983) fall to
    `min_lr_ratio * peak` at `max_steps`; `wsd` (warm-up, stable, decay, as in MiniCPM,
    arXiv:2404.06395) stays and falls linearly over the last `decay_steps`.
    """
    warmup = schedule.warmup_steps
    if step <= warmup:
        return peak * step / warmup
    floor = schedule.min_lr_ratio
    match schedule.name:
        case "constant":
            return peak
        case "linear":
            progress = (step - warmup) / (max_steps - warmup)
            return peak * (1 - (1 - floor) * progress)
        case "cosine":
            progress = (step - warmup) / (max_steps - warmup)
            return peak * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress)))
        case "wsd":
            decay = schedule.decay_steps or max(1, max_steps // 10)
            progress = max(0.0, (step - (max_steps - decay)) / decay)
            return peak * (1 - (1 - floor) * progress)
