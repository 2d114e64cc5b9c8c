"""Tests on several ranks: pytest plugin (`plugin`), data and tolerances (`compare`), simulated streams (`streams`)."""
