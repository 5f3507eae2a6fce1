"""The section `integrity`."""

from __future__ import annotations

from typing import Annotated

from kempner.config.section import Key, PositiveInt, Section


class IntegritySection(Section):
    """Proof that no bit is wrong."""

    fingerprints: bool | None = None
    """Each line of metrics.jsonl has the fingerprint of weights and optimizer state after its step,
    the same on any world: 64 bits that `kempner replay` and `kempner compare` compare. On unless
    `false`; costs 1 to 3 % of the step of a small model on CPUs."""

    parts_interval: Annotated[PositiveInt | None, Key("steps", 1000)] = None
    """Every so often parts.jsonl gets the fingerprints of every slot's loss and gradient, of the
    sum of gradients, of weights and moments, some 50 bytes for each: where a step differs,
    `kempner replay` and `kempner compare` name the slot or the tensor. Needs
    train.same_on_any_world. None by default."""

    recompute_interval: Annotated[PositiveInt | None, Key("steps", 100)] = None
    """Every so often a step is computed again by other ranks, on another node if there is one, and
    compared to the bit; a rank that lies is named, its node is left out, and the run goes back to
    the last certified checkpoint. A suspicious loss is checked, too. Needs
    train.same_on_any_world. None by default: nothing is computed twice."""

    def refuse_beside(self, same_on_any_world: bool, reduce_gradients: str) -> None:
        """Raise `ValueError` where other ranks would compute other bits, or no rank has a slot's
        whole gradient."""
        if self.parts_interval is not None:
            if not same_on_any_world:
                raise ValueError(
                    "integrity.parts_interval needs train.same_on_any_world, without which a step "
                    "has no slots; set it, or remove integrity.parts_interval"
                )
            if self.recompute_interval is not None:
                raise ValueError(
                    "integrity.recompute_interval looks at the same parts by itself; remove it or "
                    "integrity.parts_interval"
                )
        if self.recompute_interval is None:
            return
        if not same_on_any_world:
            raise ValueError(
                "integrity.recompute_interval needs train.same_on_any_world, without which another "
                "rank computes other bits; set it, or remove integrity.recompute_interval"
            )
        if reduce_gradients == "micro_batch":
            raise ValueError(
                "integrity.recompute_interval compares whole gradients, which no rank has with "
                'parallelism.reduce_gradients="micro_batch"; remove one of them'
            )
