"""An HTTP server with the OpenAI API on one engine, and a router for two such servers.

FastAPI, uvicorn and httpx come with the extra: pip install 'paceline[serve]'.
"""
