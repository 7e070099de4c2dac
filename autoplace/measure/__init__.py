"""Timing what the cost model is fitted on."""
