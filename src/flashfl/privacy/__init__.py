"""Secure aggregation and differential privacy over a common mask; see docs/privacy.md."""
