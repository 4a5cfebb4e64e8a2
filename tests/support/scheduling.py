"""Which process runs a test, where there are several: what shares an export or a fixture runs in one."""

from __future__ import annotations

import re

from xdist.scheduler import LoadScopeScheduling

from onnxlm.models.registry import architecture_names

_FAMILIES = frozenset(architecture_names())


class FamilyScheduling(LoadScopeScheduling):  # type: ignore[misc]  # has no types
    """Tests of one model family are one piece of work, and so are the others of a file."""

    def _split_scope(self, nodeid: str) -> str:
        return family_or_file(nodeid)


def family_or_file(nodeid: str) -> str:
    """The family named among a test's parameters, else its file."""
    file, _, test = nodeid.partition("::")
    words = re.split(r"[^a-z0-9_]", test.partition("[")[2])
    return next((word for word in words if word in _FAMILIES), file)
