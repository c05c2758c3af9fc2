"""Rollouts in the forms of others: messages for supervised fine-tuning, and ATIF."""
