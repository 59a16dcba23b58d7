"""Timelines: what each rank did when, as a Perfetto trace, a picture or a table."""
