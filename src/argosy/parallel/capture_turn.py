"""The capture of a CUDA graph and calls of CUDA in other threads that could spoil it take turns."""

from __future__ import annotations

import threading

CAPTURE_TURN = threading.Lock()
