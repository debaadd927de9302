"""`python -m examples.tiny_hybrid`: the training of the model and its MTP module, and its packaging."""

from .commands import make_app

app = make_app("examples.tiny_hybrid")

if __name__ == "__main__":
    app()
