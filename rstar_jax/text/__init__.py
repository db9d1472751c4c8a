"""Tokenizers, chat formats, tool-call parsing and expert steps as pure functions (floor 1)."""
