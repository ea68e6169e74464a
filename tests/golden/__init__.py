"""Golden messages: every message of some small runs, as it travels.

``python -m tests.golden [scenario ...]`` writes them anew into ``messages.jsonl.xz``. Do so only for a
change of the protocol that is meant; docs/protocol.md says which changes make a new version.
"""
