"""What makes the documentation's site out of docs/, the protos and the services' tables of roles: `make site`."""
