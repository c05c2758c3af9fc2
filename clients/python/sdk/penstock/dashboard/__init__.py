"""The dashboard: a browser page that shows running work, and the gateway through which it reaches the services.

`serve` starts it. The page itself is built from clients/web into `static/`, which is part of the wheel.
"""
