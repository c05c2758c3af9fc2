"""Backends: where sandboxes are really made. ``base`` says what one must do; each other module or package is one."""
