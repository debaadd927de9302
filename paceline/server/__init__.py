"""An HTTP server with the endpoints of the OpenAI API, on one engine.

protocol   what requests may hold, and `SamplingParams` of them
chats      from the messages of a request to a prompt, and its images
responses  /v1/responses, as a chat in another form
tools      calls of tools: found in an answer, or forced
answers    from the engine's outputs to the answer of an endpoint, whole or in pieces
service    an engine with its settings, and what every request to it goes through
streams    server-sent events; the end of a request whose client is gone or whose time is up
app        the endpoints
gate       what every request passes: request id, log line, host, key, body limit; probes and metrics
errors     errors in the API's form
metrics    counters and histograms in Prometheus' text format
tracing    spans of OpenTelemetry
connections clients that send or read too slowly
route      the confidence switch between two servers
upstream   a server that the router asks
run        uvicorn: signals, draining, logs
page.html  a chat that shows which tokens were drafted

FastAPI, uvicorn and httpx come with the extra: pip install 'paceline[serve]'.
"""
