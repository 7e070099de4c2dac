"""Running a plan: placement without algorithm."""
