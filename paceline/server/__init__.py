"""An HTTP server with the endpoints of the OpenAI API, on one engine, and a router between two such servers.

FastAPI, uvicorn and httpx come with the extra: pip install 'paceline[serve]'.
"""
