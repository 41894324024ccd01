"""Shells start background jobs with SIGINT ignored, and children inherit that; tests of Ctrl-C need the usual."""

import signal

signal.signal(signal.SIGINT, signal.default_int_handler)
