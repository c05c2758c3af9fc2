"""Terminal episodes with the API of Terminus."""
