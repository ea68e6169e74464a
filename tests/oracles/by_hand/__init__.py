"""The oracles, each checked by itself: cases worked out by hand, finite differences, fixed points."""
