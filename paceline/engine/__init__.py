"""The engine: the loop, requests and their outputs, the scheduler, and its thread for asyncio."""
