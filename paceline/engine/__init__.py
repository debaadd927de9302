"""Many requests at once on one decoder: a scheduler, and the thread that runs its turns for asyncio."""
