"""The recording proxy through which sandboxes with an allow-list reach HTTP(S), package indexes and git (R141).

It is a process of its own: parsing, TLS and copying for many sandboxes never delay the service's loop.
"""
