"""Vector backends that the planner has to tell apart, by their names."""

from __future__ import annotations

SPREAD = "process"  # worker processes step; they can do so in groups
JOINED = "joint"  # likewise, and the process that samples is one of them; in one group only
