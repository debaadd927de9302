"""An HTTP server with the endpoints of the OpenAI API, on one engine.

protocol   what requests may hold, and `SamplingParams` of them
chats      from the messages of a request to a prompt: images, tools, forced forms
answers    from the engine's outputs to choices, whole or in pieces; calls of tools in them
app        the endpoints
gate       what every request passes: request id, log line, key, body limit
errors     errors in the API's form
metrics    counters and histograms in Prometheus' text format
run        uvicorn: signals, draining, logs
page.html  a chat that shows which tokens were drafted

FastAPI and uvicorn come with the extra: pip install 'paceline[serve]'.
"""
