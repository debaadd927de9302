"""The one place that knows the insides of transformers: checkpoints, chats, images."""
