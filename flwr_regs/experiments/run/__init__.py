"""Runs comparisons: in one process, in workers, in Ray; tunes, resumes, records."""
