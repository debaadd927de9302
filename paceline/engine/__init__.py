"""Many requests at once on one decoder: the scheduler, and the thread that runs it.

scheduler  who waits, whose prompt is read, who runs; no threads, no asyncio
thread     runs its turns, and carries outputs to the loops of asyncio that wait for them
"""
