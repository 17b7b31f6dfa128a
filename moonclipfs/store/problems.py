"""What `verify` finds: one problem each, with the files that it affects."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field


class ProblemKind(enum.StrEnum):
    """What is wrong with what."""

    LOG = "log"
    PACK = "pack"
    OBJECT = "object"
    MISSING = "missing"
    CHAIN = "chain"
    TREE = "tree"
    LAYER = "layer"
    INDEX = "index"
    CONTENTS = "contents"


@dataclass(slots=True)
class Problem:
    """One problem: `where` it is and what it is. `affected` are the files (NAME@N/PATH) that cannot be read whole.

    `repaired` says that nothing is left to do.
    """

    kind: ProblemKind
    where: str
    message: str
    affected: list[str] = field(default_factory=list)
    repaired: bool = False


@dataclass(slots=True)
class VerifyReport:
    """What was looked at, and every problem. `object_bytes` are encoded bytes; in a quick run none were read.

    `base` is where the base store of a private one lies, and `base_objects` how many of its objects are needed and
    there: they were looked for, and of these only directories and recipes read.
    """

    quick: bool = False
    versions: int = 0
    packs: int = 0
    objects: int = 0
    object_bytes: int = 0
    base: str = ""
    base_objects: int = 0
    problems: list[Problem] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """True when there is no problem."""
        return not self.problems
