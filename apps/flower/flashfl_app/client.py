"""A client: its share of the configured data set."""

from __future__ import annotations

from flashfl.flower import client_app

app = client_app("flashfl.flower.app:task_of")
