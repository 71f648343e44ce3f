"""FLASH as a Flower app."""
