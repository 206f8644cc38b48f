"""The worlds that the readers answer questions about."""
