"""An agent's conversation with a user that sends it further instructions."""
