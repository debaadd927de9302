"""Training of drafters: answers of the target, losses, a resumable loop, recipes."""
