"""Timelines: what each rank did when, as a Perfetto trace, a picture or a table."""

from pkt.trace.timeline import KINDS, Event, RankSummary, Timeline

__all__ = ["KINDS", "Event", "RankSummary", "Timeline"]
