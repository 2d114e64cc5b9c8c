"""Tests on several ranks: pytest plugin (`plugin`), data and tolerances (`compare`)."""
