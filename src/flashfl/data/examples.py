"""Old name of `sources`."""

from .sources import Arrays, Lazy, Source, Subset, below, in_memory, on_device, source

__all__ = ["Arrays", "Lazy", "Source", "Subset", "below", "in_memory", "on_device", "source"]
