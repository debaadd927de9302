"""The computer: its cores and memory, files that users name, downloads, and where a number came from."""
