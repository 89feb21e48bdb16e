"""The planted bugs: small edits, and the test that kills each.

``find`` stands exactly once in the file (a test holds it to that), so a bug
cannot rot away when the code changes.
"""

from __future__ import annotations

from . import fa1, fa2, fa2_backward, host, products
from .bug import Bug

__all__ = ["BUGS", "Bug"]

BUGS = (*fa1.BUGS, *fa2.BUGS, *fa2_backward.BUGS, *products.BUGS, *host.BUGS)
