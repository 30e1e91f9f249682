"""A lock for the capture of a CUDA graph, and for calls of CUDA in other threads that could make the capture fail."""

from __future__ import annotations

import threading

CAPTURE_TURN = threading.Lock()
