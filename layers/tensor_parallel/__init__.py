"""Layers whose weights are split over the ranks of a tensor-parallel group, and the communication at their ends."""
