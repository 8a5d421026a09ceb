"""Streams, profiler labels and other helpers on top of torch."""
