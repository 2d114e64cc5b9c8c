"""Scripts to copy from."""
