"""Data sets, who holds which samples, and the tasks made of them."""
