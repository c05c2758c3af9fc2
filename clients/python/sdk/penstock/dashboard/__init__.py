"""The dashboard: a page in the browser that shows what runs, and the door through which it reaches the services.

`serve` starts it. The page itself is built from clients/web into `static/`, which the wheel carries.
"""
