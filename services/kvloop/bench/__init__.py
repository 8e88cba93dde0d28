"""Measurements: one run each, raw samples kept, ratios against what they are compared with."""
