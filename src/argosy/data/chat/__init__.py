"""Conversations: the forms they come in, chat templates, and the tokens of the assistant's turns."""
