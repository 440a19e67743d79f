"""Comparisons of accuracy: programs that train with many seeds."""
