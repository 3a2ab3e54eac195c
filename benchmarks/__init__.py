"""Measurements. Each asserts that the work was done, then times it."""
