"""Train what drafts: answers written by the target, losses, a resumable loop, recipes."""
