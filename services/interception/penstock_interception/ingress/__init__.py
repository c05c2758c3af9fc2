"""The agents' side: HTTP in the dialects that agents speak."""
