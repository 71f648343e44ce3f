"""What is measured of a run: how masks differ, what training costs in FLOPs, what travels in bytes."""
