"""Draft heads: their modules, their folders (`folder`), and the layouts of other engines (`exchange`)."""
