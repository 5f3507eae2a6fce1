"""Where there can be no lab, one sentence says why, and what to do."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from kempner.lab import place
from kempner.run.process.exit_codes import UsageError

APPARMOR = {"kernel.apparmor_restrict_unprivileged_userns": "1"}
PACKAGES = f"on Debian and Ubuntu: {place.INSTALL}"
DENIED = "unshare: unshare failed: Operation not permitted"


@pytest.mark.parametrize(
    ("lacking", "root", "denied", "settings", "said"),
    [
        ([], True, "", {}, ""),
        ([], False, "", {}, ""),
        (["slurmd", "nft"], True, "", {}, f"a lab needs slurmd, nft; {PACKAGES}"),
        (
            ["slurmd"],
            False,
            "",
            {},
            "a lab needs slurmd, and root, or a kernel that lets this user make namespaces; "
            f"{PACKAGES}",
        ),
        (
            [],
            False,
            DENIED,
            APPARMOR,
            f"this user may not make namespaces ({DENIED}): run the lab as root, or allow them by "
            "`sysctl kernel.apparmor_restrict_unprivileged_userns=0`",
        ),
        (
            [],
            False,
            DENIED,
            {"kernel.unprivileged_userns_clone": "1"},
            f"this user may not make namespaces ({DENIED}): run the lab as root",
        ),
    ],
)  # fmt: skip
def test_what_is_missing_is_said_with_what_to_do(
    lacking: list[str], root: bool, denied: str, settings: Mapping[str, str], said: str
) -> None:
    assert place.refusal(lacking, root, denied, settings) == said


def test_all_that_is_missing_is_named_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(place, "PATH", "/nowhere")
    with pytest.raises(UsageError, match=r"slurmctld.*mariadbd.*nft.*apt install slurm-wlm"):
        place.check()
