"""`python -m examples.tiny_mixture`: the training of the model, and its packaging."""

from examples.tiny_hybrid.commands import make_app

app = make_app("examples.tiny_mixture")

if __name__ == "__main__":
    app()
