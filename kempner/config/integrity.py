"""The section `integrity`."""

from __future__ import annotations

from kempner.config.section import Section


class IntegritySection(Section):
    """Proof that no bit is wrong."""

    fingerprints: bool | None = None
    """Each line of metrics.jsonl has the fingerprint of weights and optimizer state after its step,
    the same on any world: 64 bits that `kempner replay` and `kempner compare` compare. On unless
    `false`; costs less than 3% of a step."""
