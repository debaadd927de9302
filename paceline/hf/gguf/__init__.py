"""Files of llama.cpp: GGUF, read and written."""
