"""Other APIs than OpenAI's, each a translation to a chat or a completion and of the answer back."""
