"""Drafts that learn while they serve: a recorder of answers, a trainer in a process of its own, and a drafter."""
