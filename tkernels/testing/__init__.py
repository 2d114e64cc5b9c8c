"""Tests on several ranks: the pytest plugin (`plugin`) and the one judgement of results (`compare`)."""
